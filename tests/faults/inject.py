"""Faults that `plant` puts into a process before it runs train.py: FAULT says which, FAULT_RANK where, FAULT_STEP when.

Each fault patches what the fault would reach in real life: the loss, the file system, the process.
"""

import itertools
import math
import os
import runpy
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from src.checkpoint import format, write
from src.tasks.mnist import Mnist

STEP = int(os.environ.get("FAULT_STEP", "0"))


def before(owner: Any, name: str, fault: Callable[..., Any]) -> None:
    """Calls `fault` with the arguments of `owner.name` before each of its calls."""
    original = getattr(owner, name)

    def patched(*arguments: Any, **named: Any) -> Any:
        fault(*arguments, **named)
        return original(*arguments, **named)

    setattr(owner, name, patched)


def in_training_steps(steps: range, fault: Callable[[], float | None]) -> None:
    """Calls `fault` in the forward pass of these steps, counted from 1 in this process, and multiplies the loss by what
    it returns."""
    original, calls = Mnist.loss, itertools.count(1)

    def loss(self: Mnist, model: torch.nn.Module, batch: Any) -> torch.Tensor:
        value = original(self, model, batch)
        if model.training and next(calls) in steps:
            value = value * (fault() or 1)
        return value

    Mnist.loss = loss  # type: ignore[method-assign]


def in_step(fault: Callable[[], float | None]) -> Callable[[], None]:
    return lambda: in_training_steps(range(STEP, STEP + 1), fault)


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def fail() -> None:
    raise RuntimeError("the root cause")


def build_for_ever(*_: Any) -> None:
    print("building the data", flush=True)
    time.sleep(10_000)


def in_the_save(seconds: float) -> None:
    before(write.StorageWriter, "write_data", lambda w, *_: time.sleep(seconds) if is_at_step(w.checkpoint) else None)


def is_at_step(checkpoint: Path) -> bool:
    return format.step_of(checkpoint) == STEP


FAULTS: dict[str, Callable[[], None]] = {
    "die": in_step(die),
    "raise": in_step(fail),
    "hang": in_step(lambda: time.sleep(10_000)),
    "nan": in_step(lambda: math.nan),
    "nan forever": lambda: in_training_steps(range(STEP, 10**9), lambda: math.nan),
    "die before publication": lambda: before(
        write, "publish", lambda folder, files, checkpoint: die() if is_at_step(checkpoint) else None
    ),
    "die in rotation": lambda: before(format.shutil, "rmtree", lambda *_, **__: die()),
    "slow save": lambda: in_the_save(3),
    "stuck save": lambda: in_the_save(10_000),
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
