"""Trainings in processes of their own that take turns: while one computes, the others are stopped."""

import contextlib
import json
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import psutil

from benchmarks.runs import arguments, launch_command, launched, read_run, signal_all

CORES, SEED = 2, 0
CONTEXT = get_context("forkserver")  # fresh processes that need not import all this again
CONTEXT.set_forkserver_preload(["transformers.trainer", "transformers.models.llama.modeling_llama", "lightning"])


class Side:
    """A training in processes of its own, which compute only while it is their turn."""

    def __init__(self, train: Callable[[Path], None], folder: Path) -> None:
        """Starts it: its first turn begins.

        Args:
            train: writes a line with `train/loss` into run/metrics.jsonl after each interval, and work.json at the end.
            folder: its own; is created.
        """
        self.folder = folder
        (folder / "run").mkdir(parents=True)
        self.process = CONTEXT.Process(target=_begin, args=(train, folder))
        self.process.start()

    @property
    def losses(self) -> list[float]:
        """The mean training loss of each interval so far."""
        file = self.folder / "run" / "metrics.jsonl"
        lines = file.read_text().split("\n")[:-1] if file.exists() else []  # the last one may be half written
        return [record["train/loss"] for record in map(json.loads, lines) if "train/loss" in record]

    def turn(self) -> float:
        """Trains one interval. Returns: the seconds it took."""
        started = time.perf_counter()
        self._signal(signal.SIGCONT)
        self.wait()
        return time.perf_counter() - started

    def finish(self) -> dict[str, Any]:
        """Returns: what it did, as it says itself."""
        self._signal(signal.SIGCONT)
        self.process.join()
        if self.process.exitcode:
            sys.exit(f"{(self.folder / 'log').read_text()}\n{self.folder.name} failed")
        return json.loads((self.folder / "work.json").read_text())

    def wait(self) -> None:
        """Until it has written its next record, with which its turn ends."""
        before = len(self.losses)
        while len(self.losses) == before:
            if not self.process.is_alive():
                sys.exit(f"{(self.folder / 'log').read_text()}\n{self.folder.name} ended too early")
            time.sleep(0.002)
        self._signal(signal.SIGSTOP)

    def kill(self) -> None:
        if self.process.is_alive():
            self._signal(signal.SIGKILL)

    def _signal(self, number: int) -> None:
        with contextlib.suppress(psutil.NoSuchProcess):  # it has ended after its last record
            signal_all(psutil.Process(self.process.pid), number)


@contextlib.contextmanager
def sides(trainings: dict[str, Callable[[Path], None]], folder: Path) -> Iterator[list[Side]]:
    """One after the other, each until after its first interval; none survives this."""
    started: list[Side] = []
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # else it would leave stopped processes behind
    try:
        for name, train in trainings.items():
            started.append(Side(train, folder / name))
            started[-1].wait()
        yield started
    finally:
        for side in started:
            side.kill()


def _begin(train: Callable[[Path], None], folder: Path) -> None:
    os.setsid()  # the terminal's signals are for the one that it takes turns for
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    with (folder / "log").open("w") as log:
        os.dup2(log.fileno(), sys.stdout.fileno())
        os.dup2(log.fileno(), sys.stderr.fileno())
    train(folder)


def launch(settings: dict[str, Any], precision: str, folder: Path) -> dict[str, Any]:
    """Runs train.py on the CPU, into folder/run. Returns: its summary."""
    os.environ["HF_DATASETS_CACHE"] = str(folder / "cache")
    settings = {"output_dir": folder / "run", "seed": SEED, "wandb.mode": "disabled", **settings}
    launcher = [*launch_command("cpu", 1), f"--mixed_precision={precision.replace('fp32', 'no')}"]
    launched([*launcher, "train.py", *arguments(settings)], CORES, is_shown=True)
    return read_run(folder / "run").summary
