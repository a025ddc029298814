"""What a step asks of a GPU and of its host, counted on the null GPU, and the same of an earlier commit.

    git worktree add ../before COMMIT
    python -m plan.benchmarks.counts --before=../before

Per step, of the MNIST CNN and of a narrow Llama with 22 layers, alone and as rank 0 of 8 under FSDP: kernels and
collectives launched, and the host's time. Nothing is computed, so that the time is Python's, torch's and the driver
calls' alone. Kernels that one side launches more often than the other are listed by name. Both sides run at the same
time, each on a core of its own: one after the other, on a shared machine, the same code took up to a third longer in
one process than in the next. At the same time, five of seven pairs of the sharded Llama were within 3%, of the
other rows ten of 35.
"""

import argparse
import json
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from benchmarks.pairs import Comparison, save, table
from benchmarks.runs import PROJECT

LLAMA = (
    *("--task.name=causal_lm", "--task.sequence_length=64", "--global_batch_size=8"),
    *("--task.architecture.model_type=llama", "--task.architecture.hidden_size=64"),
    *("--task.architecture.intermediate_size=128", "--task.architecture.num_hidden_layers=22"),
    "--task.architecture.num_attention_heads=4",
)
MNIST = ("--task.source=digits",)
ROWS: dict[str, tuple[tuple[str, ...], int]] = {
    "MNIST CNN": (MNIST, 0),
    "MNIST CNN, a graph": ((*MNIST, "--cuda_graphs=true"), 0),
    "Llama": (LLAMA, 0),
    "Llama, compiled": ((*LLAMA, "--compile=true"), 0),
    "Llama, FSDP of 8": (LLAMA, 8),
    "Llama, FSDP of 8, compiled": ((*LLAMA, "--compile=true"), 8),
}
"""Settings, and the processes under FSDP, if any."""
STEPS, ROUNDS = 100, 7
PROBE = """
import dataclasses, json, sys
from plan.tests.gpu.probe import steps_of
arguments, processes, steps = json.loads(sys.argv[1])
print(json.dumps(dataclasses.asdict(steps_of(*arguments, steps=steps, processes=processes))))
"""


def probe(checkout: Path, arguments: tuple[str, ...], processes: int) -> dict[str, Any]:
    """Return what plan/tests/gpu/probe.py of this checkout sees of a run."""
    command = [sys.executable, "-c", PROBE, json.dumps([arguments, processes, STEPS])]
    done = subprocess.run(command, cwd=checkout, stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(done.stdout)


def compare(name: str, before: Path) -> list[Comparison]:
    """Print the kernels that differ in number. Return the rows for launches and for host time."""
    sides = (PROJECT, before)
    with ThreadPoolExecutor(len(sides)) as pool:
        rounds = [list(pool.map(lambda side: probe(side, *ROWS[name]), sides)) for _ in range(ROUNDS)]
    now, then = zip(*rounds, strict=True)
    kernels = now[-1]["kernels"], then[-1]["kernels"]
    for kernel in sorted({*kernels[0], *kernels[1]}):
        count, earlier = (of_side.get(kernel, 0) for of_side in kernels)
        if count != earlier:
            print(f"{name}: {earlier} -> {count} {kernel[:90]}", flush=True)
    launches = [[float(sum(run["kernels"].values())) for run in of_side] for of_side in (now, then)]
    host = [[run["host_milliseconds"] for run in of_side] for of_side in (now, then)]
    return [
        Comparison(f"{name}: launches", "", launches[0], launches[1], target=1, is_gain=False),
        Comparison(f"{name}: host", "ms/step", host[0], host[1], target=1, is_gain=False),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("rows", nargs="*", help=", ".join(ROWS))
    parser.add_argument("--before", type=Path, required=True, help="a checkout of the commit to compare with")
    parser.add_argument("--save", type=Path, help="a file for the rows, as JSON")
    chosen = parser.parse_args()
    rows = [row for name in chosen.rows or ROWS for row in compare(name, chosen.before.absolute())]
    print(table(rows))
    if chosen.save:
        save(rows, chosen.save)


if __name__ == "__main__":
    main()
