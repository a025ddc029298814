"""Plants a fault into a process before train.py begins: FAULT names it, FAULT_RANK the process, FAULT_STEP the step."""

import itertools
import math
import os
import runpy
import signal
import time
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from typing import Any

from torch.distributed import TCPStore

import src.distributed.accelerator
from src.checkpoint import files, write
from src.tasks.mnist import Mnist

STEP = int(os.environ.get("FAULT_STEP", "0"))
CHECKPOINT = f"step_{STEP:08d}"
FOREVER = 10_000


def before(owner: Any, name: str, fault: Callable[..., float | None]) -> None:
    """Call `fault` with the arguments of `owner.name` before each call, and multiply the result by what it returns."""
    original = getattr(owner, name)

    def patched(*arguments: Any, **named: Any) -> Any:
        factor = fault(*arguments, **named)
        result = original(*arguments, **named)
        return result if factor is None else factor * result

    setattr(owner, name, patched)


def in_steps(fault: Callable[[], float | None], steps: range = range(STEP, STEP + 1)) -> None:
    """Plant it in the forward pass of these steps, counted from 1 in this process. Saves wait until they are published
    and mirrored, so that the newest checkpoint is not a matter of chance."""
    calls, save = itertools.count(1), write.CheckpointWriter.save

    def save_and_wait(self: write.CheckpointWriter, metrics_bytes: int, run_id: str) -> None:
        save(self, metrics_bytes, run_id)
        self.poll(wait=True)
        if hasattr(self._store, "copier"):
            self._store.copier.apply(int)

    before(Mnist, "loss", lambda _, model, __: fault() if model.training and next(calls) in steps else None)
    write.CheckpointWriter.save = save_and_wait  # type: ignore[method-assign]


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def fail() -> None:
    raise RuntimeError("the root cause")


def build_forever(*_: Any) -> None:
    print("building the data", flush=True)
    time.sleep(FOREVER)


def wait_in_cpp(*_: Any) -> None:
    """Wait as for a lost process, in C++ code that Python's signal handlers don't interrupt."""
    print("waiting for others", flush=True)
    TCPStore("127.0.0.1", 0, is_master=True, timeout=timedelta(hours=1), wait_for_workers=False).get("never set")


def sleep_in_save(writer: write.StorageWriter, *_: Any, seconds: float) -> None:
    time.sleep(seconds if writer.checkpoint.name == CHECKPOINT else 0)


FAULTS: dict[str, Callable[[], None]] = {
    "die": lambda: in_steps(die),
    "raise": lambda: in_steps(fail),
    "hang": lambda: in_steps(lambda: time.sleep(FOREVER)),
    "nan": lambda: in_steps(lambda: math.nan),
    "nan forever": lambda: in_steps(lambda: math.nan, range(STEP, 10**9)),
    "die before publication": lambda: before(write, "publish", lambda *a: die() if a[2].name == CHECKPOINT else None),
    "die in rotation": lambda: before(files.shutil, "rmtree", lambda p, **_: die() if "deleted_" in str(p) else None),
    "slow save": lambda: before(write.StorageWriter, "write_data", partial(sleep_in_save, seconds=3)),
    "stuck save": lambda: before(write.StorageWriter, "write_data", partial(sleep_in_save, seconds=FOREVER)),
    "lost while they meet": lambda: before(src.distributed.accelerator, "find_launcher", wait_in_cpp),
    "lost while data are built": lambda: before(Mnist, "build_datasets", wait_in_cpp),
    "slow data": lambda: before(Mnist, "build_datasets", build_forever),
    "slow evaluation": lambda: before(Mnist, "evaluate", lambda *_: time.sleep(1)),
}


def plant() -> None:
    """Plant the fault, if this is the process to fail; by default, all do."""
    rank = os.environ.get("RANK", "0")
    if os.environ.get("FAULT_RANK", rank) == rank:
        FAULTS[os.environ["FAULT"]]()


if __name__ == "__main__":
    plant()
    runpy.run_path("train.py", run_name="__main__")
