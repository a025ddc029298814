"""What a run's record and its safety cost: all that train.py does besides training, switched on, against a bare run.

    python -m benchmarks.everything_on

The MNIST CNN of configs/mnist.yaml without augmentation, bf16, one process with two threads, 500 steps.
- on: W&B offline, a record every 50 steps, a checkpoint every 100, the progress bar, which only a terminal gets to see:
  the run is started on one.
- off: W&B disabled, three records, no checkpoint but the last, no terminal.
In turn, several times, each in fresh processes. bf16, as its steps are the shortest: in fp32 all this costs a smaller
share.

Equal work, which is asserted: the same (random) images in the same order and the same steps, and so the same mean of
the training losses within 1e-6, and the same evaluation loss in the end; and that all that is on was.

What is timed is the loop from step 200 to the record of the last, as each run reports it (`perf/samples_per_second` in
metrics.jsonl): with three pauses for saving, and with what the threads and processes that write in the background take
from the two cores meanwhile; without the evaluation and the save at the end, which both sides have. In the first 200
steps W&B's process starts, and what a checkpoint needs is imported in a thread: about a second, once.
"""

import fcntl
import os
import pty
import struct
import subprocess
import sys
import tempfile
import termios
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks import pairs
from benchmarks.pairs import Comparison
from benchmarks.runs import PROJECT, Run, arguments, environment, launch_command, launched, read_run, write_images

ROUNDS, STEPS, FIRST, BATCH = 5, 500, 200, 64
SAVE_EVERY, LOG_EVERY, NEVER = 100, 50, 1_000_000
SAVES = (STEPS - 1) // SAVE_EVERY  # besides the one at the end
THREADS = 2
ON = {"wandb.mode": "offline", "save_every": SAVE_EVERY, "log_every": LOG_EVERY}
OFF = {"wandb.mode": "disabled", "save_every": NEVER, "log_every": FIRST}


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


def run(data: Path, switches: dict[str, Any], start: Callable[[list[str]], str]) -> Run:
    settings = {
        "config": PROJECT / "configs" / "mnist.yaml",
        "task.data_dir": data,
        "task.shift": 0,
        "task.rotation": 0,
        "max_steps": STEPS,
        "eval_every": NEVER,
        **switches,
    }
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder, "run")
        command = [*launch_command("cpu", 1), "--mixed_precision=bf16", "train.py"]
        printed = start([*command, *arguments(settings | {"output_dir": output})])
        found = read_run(output)
        is_on = switches is ON
        assert len(list(output.glob("wandb/offline-run-*"))) == is_on
        assert (output / f"checkpoints/step_{SAVES * SAVE_EVERY:08d}").exists() == is_on
    assert ("step/s" in printed) == is_on, printed
    assert printed.count("(paused ") == (SAVES + 1 if is_on else 1), printed
    assert len(found.records) == -(-STEPS // (LOG_EVERY if is_on else FIRST))
    assert (found.summary["step"], found.summary["precision"]) == (STEPS, "bf16")
    return found


def over_steps(records: list[dict[str, Any]], value: Callable[[dict[str, Any]], float], first: int = 0) -> float:
    """The mean over the steps after `first` of what each record says about its own."""
    steps = [record["step"] for record in records]
    intervals = zip(records, [0, *steps], steps, strict=False)
    return sum(value(record) * (end - begin) for record, begin, end in intervals if end > first) / (STEPS - first)


def assert_equal_work(on: Run, off: Run) -> None:
    losses = [over_steps(side.records, lambda record: record["train/loss"]) for side in (on, off)]
    assert abs(losses[0] / losses[1] - 1) < 1e-6, losses
    assert on.summary["eval/loss"] == off.summary["eval/loss"]


def measure(data_dir: str) -> list[Comparison]:
    runs: dict[str, list[Run]] = {"on": [], "off": []}

    def milliseconds(side: str) -> float:
        switches, start = (ON, in_terminal) if side == "on" else (OFF, lambda command: launched(command, THREADS))
        found = run(data, switches, start)
        runs[side].append(found)
        return over_steps(found.records, lambda record: 1e3 * BATCH / record["perf/samples_per_second"], FIRST)

    with tempfile.TemporaryDirectory() as folder:
        data = Path(folder, "data")
        write_images(data, STEPS * BATCH)
        on, off = pairs.in_turn(ROUNDS, lambda: milliseconds("on"), lambda: milliseconds("off"))
    for one, other in zip(runs["on"], runs["off"], strict=True):
        assert_equal_work(one, other)
    question = "everything on against everything off: step, MNIST CNN, bf16"
    return [Comparison(question, "ms", on, off, 1.03, is_gain=False)]


if __name__ == "__main__":
    pairs.main(measure, __doc__)
