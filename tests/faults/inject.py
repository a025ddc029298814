"""Faults that `plant` puts into a process before it runs train.py: FAULT says which, FAULT_RANK where, FAULT_STEP when.

Each fault patches what the fault would reach in real life: the loss, the file system, the process.
"""

import atexit
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
from src.training import batches as loading

STEP = int(os.environ.get("FAULT_STEP", "0"))


def before(owner: Any, name: str, fault: Callable[..., Any]) -> None:
    """Calls `fault` with the arguments of `owner.name` before each of its calls."""
    original = getattr(owner, name)

    def patched(*arguments: Any, **named: Any) -> Any:
        fault(*arguments, **named)
        return original(*arguments, **named)

    setattr(owner, name, patched)


def at_training_step(fault: Callable[[], None]) -> None:
    """Calls `fault` in the forward pass of step FAULT_STEP, counted from 1 in this process."""
    calls = iter(range(1, 10**9))

    def count(_: Any, model: torch.nn.Module, *__: Any) -> None:
        if model.training and next(calls) == STEP:
            fault()

    before(Mnist, "loss", count)


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def fail() -> None:
    raise RuntimeError("the root cause")


def not_a_number(steps: range) -> None:
    """A gradient of this process is NaN in these steps."""
    original, calls = Mnist.loss, iter(range(1, 10**9))

    def loss(self: Mnist, model: torch.nn.Module, batch: Any) -> torch.Tensor:
        value = original(self, model, batch)
        if model.training and next(calls) in steps:
            value = value * torch.tensor(float("nan"))
        return value

    Mnist.loss = loss  # type: ignore[method-assign]


def build_for_ever(*_: Any) -> None:
    print("building the data", flush=True)
    time.sleep(10_000)


def count_batches() -> None:
    """Prints at the end how many batches were made, to train on and to evaluate on; not pictures for the tables."""
    made: list[int] = []
    before(loading, "samples", lambda *_: made.append(1))
    atexit.register(lambda: print(f"batches made: {len(made)}", flush=True))


def in_the_save(seconds: float) -> None:
    before(write.StorageWriter, "write_data", lambda w, *_: time.sleep(seconds) if is_at_step(w.checkpoint) else None)


def is_at_step(checkpoint: Path) -> bool:
    return format.step_of(checkpoint) == STEP


FAULTS: dict[str, Callable[[], None]] = {
    "die": lambda: at_training_step(die),
    "raise": lambda: at_training_step(fail),
    "hang": lambda: at_training_step(lambda: time.sleep(10_000)),
    "nan": lambda: not_a_number(range(STEP, STEP + 1)),
    "nan forever": lambda: not_a_number(range(STEP, 10**9)),
    "die before publication": lambda: before(
        write, "publish", lambda folder, files, checkpoint: die() if is_at_step(checkpoint) else None
    ),
    "die in rotation": lambda: before(format.shutil, "rmtree", lambda *_, **__: die()),
    "slow save": lambda: in_the_save(3),
    "stuck save": lambda: in_the_save(10_000),
    "slow data": lambda: before(Mnist, "build_datasets", build_for_ever),
    "slow evaluation": lambda: before(Mnist, "evaluate", lambda *_: time.sleep(4)),
    "count batches": count_batches,
}


def plant() -> None:
    """In this process, if it is the one: by default, the first."""
    rank = os.environ.get("RANK", "0")
    if os.environ.get("FAULT_RANK", rank) == rank:
        FAULTS[os.environ["FAULT"]]()


if __name__ == "__main__":
    plant()
    runpy.run_path("train.py", run_name="__main__")
