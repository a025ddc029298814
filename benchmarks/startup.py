"""Start-up: from `accelerate launch` to the first finished step, against an empty script.

    python -m benchmarks.startup [--data_dir=DIR]

configs/mnist.yaml to its first record (log_every=1), against a script that only builds an Accelerator(). The launcher
is most of both: it imports torch, and then starts a process that imports it again. Ours reads MNIST besides.
"""

import tempfile
import time
from functools import partial
from pathlib import Path

from benchmarks import pairs
from benchmarks.pairs import Comparison, in_turn
from benchmarks.runs import CORES, PROJECT, Side, launch, running, train_py


def seconds_until(says: str, command: list[str], folder: Path) -> float:
    """Return those from starting the command until it has printed `says`."""
    side = Side(command, Path(tempfile.mkdtemp(dir=folder)), CORES)
    with running(side):
        started = time.perf_counter()
        side.start()
        side.wait(lambda: says in side.log)
        return time.perf_counter() - started


def measure(data_dir: Path, folder: Path) -> list[Comparison]:
    settings = {"config": PROJECT / "configs/mnist.yaml", "task.data_dir": data_dir, "log_every": 1, "max_steps": 2}
    empty = folder / "empty.py"
    empty.write_text("from accelerate import Accelerator\nAccelerator()\nprint('built', flush=True)\n")
    first_step = partial(seconds_until, "step      1/", train_py(settings), folder)
    ours, theirs = in_turn(5, first_step, partial(seconds_until, "built", [*launch("cpu"), str(empty)], folder))
    return [Comparison("start-up: first MNIST step, empty script", "s", ours, theirs, 1.6, is_gain=False)]


if __name__ == "__main__":
    pairs.main(measure, __doc__)
