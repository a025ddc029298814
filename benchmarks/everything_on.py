"""What a run's record and its safety cost: all that train.py does besides training, switched on, against a bare run.

    python -m benchmarks.everything_on

The MNIST CNN under cpu.yaml: fp32, one process with two threads. On: W&B offline, a checkpoint every 100 steps, the
progress bar, for which it is started on a terminal. Off: W&B disabled, no checkpoint but the last, no terminal. Both
write a record every 50 steps, which ends a turn. A pair is two turns of each, with one pause for saving, and with what
writes in the background. The first 200 steps don't count, nor do the evaluation and the save at the end.

Equal work, which is asserted: the same (random) images in the same order and the same steps, and so the same training
losses within 1e-6, and the same evaluation loss in the end; and that all that is on was.
"""

import shlex
from pathlib import Path

import numpy as np

from benchmarks import pairs
from benchmarks.pairs import Comparison, drift
from benchmarks.runs import CNN, CORES, Side, take_turns, train_py, write_images

ROUNDS, WARM_UP, BATCH = 10, 2, 64
SAVE_EVERY, LOG_EVERY = 100, 50
TURNS = SAVE_EVERY // LOG_EVERY
STEPS = (WARM_UP + ROUNDS) * SAVE_EVERY


def in_terminal(command: list[str]) -> list[str]:
    """Return what starts the command on a terminal of its own."""
    sized = f"stty cols 120 rows 40; exec {shlex.join(command)}"  # a new one has no columns for a bar
    return ["script", "--quiet", "--return", "--command", sized, "/dev/null"]


def assert_equal_work(on: Side, off: Side) -> None:
    for side in (on, off):
        is_on, printed = side is on, side.log
        assert len(list(side.folder.glob("run/wandb/offline-run-*"))) == is_on
        assert ("% █" in printed) == is_on, printed
        assert printed.count("(paused ") == (STEPS // SAVE_EVERY if is_on else 1), printed
        assert len(side.values) == STEPS // LOG_EVERY
        assert (side.summary["step"], side.summary["precision"]) == (STEPS, "fp32")
    assert on.summary["eval/loss"] == off.summary["eval/loss"]
    off_by = drift(on.values, off.values)
    assert off_by < 1e-6, f"losses {off_by:.0e} apart"


def measure(_: Path, folder: Path) -> list[Comparison]:
    settings = CNN | {"task.data_dir": folder / "data", "max_steps": STEPS, "log_every": LOG_EVERY}
    switched_on = settings | {"wandb.mode": "offline", "save_every": SAVE_EVERY}
    on = Side(in_terminal(train_py(switched_on)), folder / "on", CORES)
    off = Side(train_py(settings), folder / "off", CORES)
    write_images(folder / "data", STEPS * BATCH)
    turns = take_turns(ROUNDS * TURNS, (on, off), WARM_UP * TURNS)
    assert_equal_work(on, off)
    ours, theirs = (1e3 * np.reshape(turns, (2, ROUNDS, TURNS)).sum(-1) / SAVE_EVERY).tolist()
    question = "everything on against everything off: step, MNIST CNN, fp32"
    return [Comparison(question, "ms", ours, theirs, 1.03, is_gain=False)]


if __name__ == "__main__":
    pairs.main(measure, __doc__)
