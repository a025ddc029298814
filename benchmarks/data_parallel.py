"""Data parallelism: two processes of one thread against one, and DDP against data parallelism by hand.

    python -m benchmarks.data_parallel [--data_dir=DIR]

The CNN, AdamW, global batches of 64, fp32, on gloo: the same batches on one process and on two. Five variants in turn:
one process; src/reference.py, with an all_reduce for each of the CNN's eight parameters after the backward pass; DDP,
which reduces two buckets during it; DDP with ddp_bf16_hook.yaml, which sends half the bytes; and the limit, two runs at
once that share nothing, of 32 images a step. The first 30 losses (but the limit's) are asserted to be the same within
1e-5 (with the hook 1e-3). Steps are timed by each run itself, start-up and evaluation apart.

Where the time of two processes goes that one doesn't need. The limit is not 2, as each has the whole optimizer's work.
A step that waits for the other process, be it only for six numbers, takes 3 ms more on two virtual cores: the slower
one of two, and gloo's threads waking up. The gradients, 4.8 MB through the loopback interface, take 3.3 ms of each
core that computes; the largest layer's are ready first, and on their way while the convolutions' are computed. In bf16
they take 2 ms, and the casts the rest.
"""

import re
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from benchmarks import pairs
from benchmarks.pairs import Comparison, in_turn
from benchmarks.runs import launch_command, launched, read_run

STEPS, COMPARED, ROUNDS = 80, 30, 3
BY_HAND = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "-m", "src.reference"]
COMMANDS = {
    "by hand": BY_HAND,
    "cpu": [*launch_command("cpu", 1), "train.py"],
    **{yaml: [*launch_command(yaml, 2), "train.py"] for yaml in ("ddp", "ddp_bf16_hook")},
}


def run(variant: str, settings: list[str]) -> tuple[float, list[float]]:
    """Returns: milliseconds per step, and the losses."""
    with tempfile.TemporaryDirectory() as folder:
        printed = launched([*COMMANDS[variant], *settings, f"--output_dir={folder}/run"])
        if variant == "by hand":
            (milliseconds,) = re.findall(r"^([\d.]+) ms per step", printed, re.MULTILINE)
            return float(milliseconds), [float(line.split()[-1]) for line in re.findall(r"^step .*", printed, re.M)]
        found = read_run(Path(folder, "run"))
        return 64e3 / found.summary["samples_per_second"], [record["train/loss"] for record in found.records]


def limit(settings: list[str]) -> float:
    """Returns: milliseconds per step of the slower one of two that share nothing."""
    with ThreadPoolExecutor(2) as pool:
        return max(pool.map(lambda _: run("cpu", [*settings, "--global_batch_size=32"])[0] / 2, range(2)))


def measure(data_dir: str) -> list[Comparison]:
    settings = ["--config=configs/mnist.yaml", f"--task.data_dir={data_dir}", f"--max_steps={STEPS}", "--log_every=1"]
    settings += ["--task.rotation=0", "--task.shift=0", "--task.dropout=0", "--wandb.mode=disabled"]
    settings += [f"--eval_every={STEPS}", "--save_every=1000"]
    losses: dict[str, list[float]] = {}

    def timed(variant: str) -> float:
        milliseconds, losses[variant] = run(variant, settings)
        return milliseconds

    one, by_hand, ddp, hooked, apart = in_turn(
        ROUNDS,
        lambda: timed("cpu"),
        lambda: timed("by hand"),
        lambda: timed("ddp"),
        lambda: timed("ddp_bf16_hook"),
        lambda: limit(settings),
    )
    for variant, within in (("by hand", 1e-5), ("ddp", 1e-5), ("ddp_bf16_hook", 1e-3)):
        pairs_of_losses = zip(losses[variant][:COMPARED], losses["cpu"], strict=False)
        assert all(abs(a / b - 1) <= within for a, b in pairs_of_losses), variant
    return [
        Comparison("2 processes, bf16 hook, against 1", "ms/step", hooked, one, 1.55, is_gain=True),
        Comparison("2 processes, DDP, against 1", "ms/step", ddp, one, 1.43, is_gain=True),
        Comparison("2 processes, bf16 hook, against by hand", "ms/step", hooked, by_hand, 1.4, is_gain=True),
        Comparison("2 processes, DDP, against by hand", "ms/step", ddp, by_hand, 1.3, is_gain=True),
        Comparison("2 processes that share nothing (the limit), against 1", "ms/step", apart, one, 1, is_gain=True),
    ]


if __name__ == "__main__":
    pairs.main(measure, __doc__)
