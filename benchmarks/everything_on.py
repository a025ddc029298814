"""What a run's record and its safety cost: all that train.py does besides training, switched on, against a bare run.

    python -m benchmarks.everything_on

The MNIST CNN of configs/mnist.yaml without augmentation under cpu.yaml: fp32, one process with two threads.
- on: W&B offline, a checkpoint every 100 steps, the progress bar, which only a terminal gets to see: it is started on
  one.
- off: W&B disabled, no checkpoint but the last, no terminal.
Both write a record every 50 steps, which ends a turn: the other one is stopped meanwhile. A pair is two turns of each,
100 steps, with one pause for saving, and with what the threads and processes that write in the background take from the
two cores. The first 200 steps don't count: W&B's process starts, and what a checkpoint needs is imported in a thread,
about a second, once. Nor do the evaluation and the save at the end, which both sides have.

Equal work, which is asserted: the same (random) images in the same order and the same steps, and so the same training
losses within 1e-6, and the same evaluation loss in the end; and that all that is on was.

Where the time goes: to write a checkpoint, 14 MB, takes one core 70 ms, half of it where the kernel has to find pages
for a new file; the copy that training waits for takes 4 ms. That is all the same in bf16, whose steps take half the
time: there the ratio was 1.02 to 1.06, at half as many rounds.
"""

import fcntl
import json
import os
import pty
import struct
import subprocess
import sys
import tempfile
import termios
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import pairs
from benchmarks.pairs import Comparison, in_turn
from benchmarks.runs import PROJECT, arguments, environment, launch_command, launched, read_run, write_images
from benchmarks.turns import Side, sides

ROUNDS, WARM_UP, BATCH = 10, 2, 64
SAVE_EVERY, LOG_EVERY, NEVER = 100, 50, 1_000_000
TURNS = SAVE_EVERY // LOG_EVERY
STEPS = (WARM_UP + ROUNDS) * SAVE_EVERY
THREADS = 2
SWITCHES = {
    "on": {"wandb.mode": "offline", "save_every": SAVE_EVERY},
    "off": {"wandb.mode": "disabled", "save_every": NEVER},
}


def in_terminal(command: list[str]) -> str:
    """What it writes on a terminal of its own."""
    ours, its = pty.openpty()
    fcntl.ioctl(its, termios.TIOCSWINSZ, struct.pack("4H", 40, 120, 0, 0))  # a new one has no columns for a bar
    process = subprocess.Popen(command, cwd=PROJECT, env=environment(THREADS), stdout=its, stderr=its)
    os.close(its)
    written = b""
    while part := _read(ours):
        written += part
    os.close(ours)
    if process.wait():
        sys.exit(f"{' '.join(command)}\n{written.decode()}\nended with exit code {process.returncode}")
    return written.decode()


def _read(terminal: int) -> bytes:
    try:
        return os.read(terminal, 65536)
    except OSError:  # how Linux says that nobody writes to it any more
        return b""


def train(is_on: bool, folder: Path) -> None:
    settings: dict[str, Any] = {
        "config": PROJECT / "configs" / "mnist.yaml",
        "output_dir": folder / "run",
        "task.data_dir": folder.parent / "data",
        "task.shift": 0,
        "task.rotation": 0,
        "max_steps": STEPS,
        "log_every": LOG_EVERY,
        "eval_every": NEVER,
        **SWITCHES["on" if is_on else "off"],
    }
    command = [*launch_command("cpu", 1), "train.py", *arguments(settings)]
    printed = in_terminal(command) if is_on else launched(command, THREADS)
    (folder / "work.json").write_text(json.dumps({"printed": printed}))


def assert_equal_work(started: list[Side]) -> None:
    for side in started:
        is_on = side.folder.name == "on"
        output, printed = side.folder / "run", side.finish()["printed"]
        assert len(list(output.glob("wandb/offline-run-*"))) == is_on
        assert ("step/s" in printed) == is_on, printed
        assert printed.count("(paused ") == (STEPS // SAVE_EVERY if is_on else 1), printed
        assert len(side.losses) == STEPS // LOG_EVERY
    on, off = (read_run(side.folder / "run").summary for side in started)
    assert all((run["step"], run["precision"]) == (STEPS, "fp32") for run in (on, off))
    assert on["eval/loss"] == off["eval/loss"]
    drift = max(abs(a / b - 1) for a, b in zip(*(side.losses for side in started), strict=True))
    assert drift < 1e-6, f"losses {drift:.0e} apart"


def measure(data_dir: str) -> list[Comparison]:
    """
    Args:
        data_dir: not used: the images are random.
    """
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_images(folder / "data", STEPS * BATCH)
        with sides({"on": partial(train, True), "off": partial(train, False)}, folder) as started:
            for side in started:
                for _ in range(WARM_UP * TURNS - 1):
                    side.turn()
            turns = in_turn(ROUNDS * TURNS, *(side.turn for side in started))
            assert_equal_work(started)
    on, off = (1e3 * np.reshape(turns, (2, ROUNDS, TURNS)).sum(-1) / SAVE_EVERY).tolist()
    question = "everything on against everything off: step, MNIST CNN, fp32"
    return [Comparison(question, "ms", on, off, 1.03, is_gain=False)]


if __name__ == "__main__":
    pairs.main(measure, __doc__)
