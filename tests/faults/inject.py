"""Faults that `plant` puts into a process before train.py: FAULT says which, FAULT_RANK where, FAULT_STEP when."""

import itertools
import math
import os
import runpy
import signal
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

from torch.distributed import TCPStore

import src.distributed.accelerator
from src.checkpoint import files, write
from src.tasks.mnist import Mnist

STEP = int(os.environ.get("FAULT_STEP", "0"))


def before(owner: Any, name: str, fault: Callable[..., float | None]) -> None:
    """Call `fault` with the arguments of `owner.name` before each call, and multiply the result by what it returns."""
    original = getattr(owner, name)

    def patched(*arguments: Any, **named: Any) -> Any:
        factor = fault(*arguments, **named)
        result = original(*arguments, **named)
        return result if factor is None else factor * result

    setattr(owner, name, patched)


def in_steps(fault: Callable[[], float | None], steps: range = range(STEP, STEP + 1)) -> Callable[[], None]:
    """In the forward pass of these steps, counted from 1 in this process, after every save before has been completed:
    else, which one is the newest would be a matter of chance."""
    calls, save = itertools.count(1), write.CheckpointWriter.save

    def save_and_wait(self: write.CheckpointWriter, metrics_bytes: int, run_id: str) -> None:
        save(self, metrics_bytes, run_id)
        self.poll(wait=True)
        if hasattr(self._store, "copier"):
            self._store.copier.apply(int)  # after the copy in the mirror

    def plant() -> None:
        before(Mnist, "loss", lambda _, model, __: fault() if model.training and next(calls) in steps else None)
        write.CheckpointWriter.save = save_and_wait  # type: ignore[method-assign]

    return plant


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def fail() -> None:
    raise RuntimeError("the root cause")


def build_for_ever(*_: Any) -> None:
    print("building the data", flush=True)
    time.sleep(10_000)


def wait_in_cpp(*_: Any) -> None:
    """As for a process that is lost, in code that Python's own handlers of signals don't interrupt."""
    print("waiting for others", flush=True)
    TCPStore("127.0.0.1", 0, is_master=True, timeout=timedelta(hours=1), wait_for_workers=False).get("what none says")


def in_the_save(seconds: float) -> None:
    before(write.StorageWriter, "write_data", lambda w, *_: time.sleep(seconds) if is_at_step(w.checkpoint) else None)


def is_at_step(checkpoint: Path) -> bool:
    return checkpoint.name == f"step_{STEP:08d}"


FAULTS: dict[str, Callable[[], None]] = {
    "die": in_steps(die),
    "raise": in_steps(fail),
    "hang": in_steps(lambda: time.sleep(10_000)),
    "nan": in_steps(lambda: math.nan),
    "nan forever": in_steps(lambda: math.nan, range(STEP, 10**9)),
    "die before publication": lambda: before(
        write, "publish", lambda folder, files, checkpoint: die() if is_at_step(checkpoint) else None
    ),
    "die in rotation": lambda: before(
        files.shutil, "rmtree", lambda path, **_: die() if "deleted_" in str(path) else None
    ),
    "slow save": lambda: in_the_save(3),
    "stuck save": lambda: in_the_save(10_000),
    "lost while they meet": lambda: before(src.distributed.accelerator, "find_launcher", wait_in_cpp),
    "lost while data are built": lambda: before(Mnist, "build_datasets", wait_in_cpp),
    "slow data": lambda: before(Mnist, "build_datasets", build_for_ever),
    "slow evaluation": lambda: before(Mnist, "evaluate", lambda *_: time.sleep(1)),
}


def plant() -> None:
    """In this process, if it is the one: by default, the first."""
    rank = os.environ.get("RANK", "0")
    if os.environ.get("FAULT_RANK", rank) == rank:
        FAULTS[os.environ["FAULT"]]()


if __name__ == "__main__":
    plant()
    runpy.run_path("train.py", run_name="__main__")
