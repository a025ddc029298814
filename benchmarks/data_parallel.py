"""Data parallelism: two processes of one thread against one, and DDP against data parallelism by hand.

    python -m benchmarks.data_parallel

The CNN, AdamW, global batches of 64 random images, fp32, on gloo: the same batches on one process and on two. Five
sides: one process; src/reference.py, with an all_reduce for each of the CNN's eight parameters after the backward pass;
DDP, which reduces two buckets during it; DDP with ddp_bf16_hook.yaml, which sends half the bytes; and the limit, two
runs at once that share nothing, of 32 images a step. Each starts once, trains 40 steps that don't count, and then they
take turns of 40 steps, the others being stopped.

On AMD's CPUs all but the one by hand multiply the CNN's large layer by oneDNN (src/mkl.py): 2 ms less in a step.

Equal work, which is asserted: the mean loss of the first 40 steps (but the limit's) is the same within 1e-5, with the
hook 1e-3.

Where the time of two processes goes that one doesn't need. The limit is not 2, as each has the whole optimizer's work.
A step that waits for the other process, be it only for six numbers, takes 3 to 6 ms more on two virtual cores, and more
where neighbours take them away for moments: it waits for the slower one of two, and for gloo's threads to wake up
beside the two that compute. The gradients, 4.8 MB through the loopback interface, take 3.3 ms of each core; the largest
layer's are ready first, and on their way while the convolutions' are computed. In bf16 they take 2 ms, and the casts
the rest.
"""

import re
import signal
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import psutil

from benchmarks import pairs
from benchmarks.llama import record
from benchmarks.pairs import Comparison, in_turn
from benchmarks.runs import PROJECT, arguments, environment, launch_command, launched, signal_all, write_images
from benchmarks.turns import sides

INTERVAL, ROUNDS, BATCH = 40, 6, 64
STEPS = INTERVAL * (1 + ROUNDS)
BY_HAND = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "-m", "src.reference"]
ONE = [*launch_command("cpu", 1), "train.py"]


def settings(folder: Path, **others: Any) -> list[str]:
    chosen: dict[str, Any] = {
        "config": PROJECT / "configs" / "mnist.yaml",
        "output_dir": folder / "run",
        "global_batch_size": BATCH,
        "max_steps": STEPS,
        "log_every": INTERVAL,
        "eval_every": 1_000_000,
        "save_every": 1_000_000,
        "wandb.mode": "disabled",
        "task.data_dir": folder.parent / "data",
        "task.rotation": 0,
        "task.shift": 0,
        "task.dropout": 0,
    }
    return arguments(chosen | others)


def train(command: list[str], folder: Path) -> None:
    launched([*command, *settings(folder)], is_shown=True)
    (folder / "work.json").write_text("{}")


def train_by_hand(folder: Path) -> None:
    """src/reference.py prints each step's loss."""
    losses = []
    command = [*BY_HAND, *settings(folder)]
    with subprocess.Popen(command, cwd=PROJECT, env=environment(), stdout=subprocess.PIPE, text=True) as process:
        for line in process.stdout or ():
            if found := re.fullmatch(r"step \d+  loss (.*)\n", line):
                losses.append(float(found[1]))
                if len(losses) % INTERVAL == 0:
                    record(folder, statistics.mean(losses[-INTERVAL:]))
    assert process.returncode == 0
    (folder / "work.json").write_text("{}")


def train_apart(folder: Path) -> None:
    """One of two that share nothing; the other one trains as long as it does."""
    half = BATCH // 2
    longer = settings(folder, global_batch_size=half, max_steps=3 * STEPS, output_dir=folder / "other")
    process = subprocess.Popen([*ONE, *longer], cwd=PROJECT, env=environment())
    launched([*ONE, *settings(folder, global_batch_size=half)], is_shown=True)
    assert process.poll() is None
    signal_all(psutil.Process(process.pid), signal.SIGKILL)
    (folder / "work.json").write_text("{}")


def measure(data_dir: str) -> list[Comparison]:
    """
    Args:
        data_dir: not used: the images are random.
    """
    trainings: dict[str, Callable[[Path], None]] = {
        "one": partial(train, ONE),
        "by hand": train_by_hand,
        **{yaml: partial(train, [*launch_command(yaml, 2), "train.py"]) for yaml in ("ddp", "ddp_bf16_hook")},
        "apart": train_apart,
    }
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_images(folder / "data", STEPS * BATCH)
        with sides(trainings, folder) as started:
            turns = in_turn(ROUNDS, *(side.turn for side in started))
            for side in started:
                side.finish()
            losses = {side.folder.name: side.losses[0] for side in started}
    for compared, within in (("by hand", 1e-5), ("ddp", 1e-5), ("ddp_bf16_hook", 1e-3)):
        drift = abs(losses[compared] / losses["one"] - 1)
        assert drift <= within, f"{compared}: a loss {drift:.0e} away from that of one process"
    one, by_hand, ddp, hooked, apart = ([1e3 * seconds / INTERVAL for seconds in of_side] for of_side in turns)
    return [
        Comparison("2 processes, bf16 hook, against 1", "ms/step", hooked, one, 1.55, is_gain=True),
        Comparison("2 processes, DDP, against 1", "ms/step", ddp, one, 1.43, is_gain=True),
        Comparison("2 processes, bf16 hook, against by hand", "ms/step", hooked, by_hand, 1.4, is_gain=True),
        Comparison("2 processes, DDP, against by hand", "ms/step", ddp, by_hand, 1.3, is_gain=True),
        Comparison("2 processes that share nothing (the limit), against 1", "ms/step", apart, one, 1, is_gain=True),
    ]


if __name__ == "__main__":
    pairs.main(measure, __doc__)
