"""Which strategies and numbers of GPUs a run fits on: each is tried in a process of its own."""

import math
import multiprocessing
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, replace
from typing import Any

import torch

from plan.gpus import Gpu
from plan.measure import Measured, Setup, measure
from src.config.config import Config
from src.config.errors import UserError, cause

YAMLS = ("single_gpu", "ddp", "fsdp_grad_op", "fsdp", "hsdp", "fsdp_offload")
"""The strategies that are tried by default."""
CP_YAML = "fsdp_cp"
"""The strategy for sequences that are too long for one GPU: tried only if --yamls names it."""
SAVE_MEMORY = ("activation_checkpointing", "activation_offload")
"""Settings that are tried where a run does not fit, one after the other: each comes on top of the one before it."""
FORK: Any = multiprocessing.get_context("fork")
"""A forked process starts with all modules imported."""


@dataclass(frozen=True)
class Row:
    """The outcome of trying a Setup."""

    setup: Setup
    measured: Measured | None
    """With micro-batches that fit or, if none do, with the smallest; None: it can't be run."""
    reason: str = ""
    """Why it can't be run."""

    @property
    def is_fitting(self) -> bool:
        """Return whether some micro-batch fits."""
        return bool(self.measured and self.measured.largest)


def setups(arguments: list[str], yamls: list[str], sizes: list[int], gpu: Gpu) -> Iterator[Setup]:
    """Yield the run under each strategy, on each number of GPUs that the strategy can use."""
    for gpus in sorted({*sizes}):
        possible = {"single_gpu": gpus == 1, "fsdp_offload": True, "hsdp": gpus > gpu.gpus_per_machine}
        shareable = math.gcd(gpus, gpu.gpus_per_machine)  # GPUs that share sequences are in one machine
        for yaml in yamls:
            setup = Setup(tuple(arguments), f"accelerate_configs/{yaml}.yaml", gpus, gpu)
            if yaml == CP_YAML:
                yield from (replace(setup, cp_size=2**i) for i in range(1, 8) if shareable % 2**i == 0)
            elif possible.get(yaml, gpus > 1):
                yield setup


def explore_until_it_fits(setup: Setup, config: Config) -> Iterator[Row]:
    """Yield the outcome of a setup and, as long as it doesn't fit, of the same with one more setting of SAVE_MEMORY.
    `config`: the run's settings."""
    yield (row := explore(setup))
    for name in SAVE_MEMORY:
        if getattr(config, name, True):  # on already, or not in this copy of the project
            continue
        if row.is_fitting or not row.measured:
            return
        row = explore(replace(row.setup, arguments=(*row.setup.arguments, f"--{name}=true"), added=name))
        if row.measured:  # not every model has blocks to recompute
            yield row


def explore(setup: Setup) -> Row:
    """Measure a setup in a new process, or find out why it can't be run."""
    share = 1.0
    while True:
        try:
            with ProcessPoolExecutor(1, FORK) as pool:
                return Row(setup, pool.submit(_measure_safely, setup, share).result())
        except torch.OutOfMemoryError:
            share -= 0.05  # leave room for fragmentation
        except UserError as error:
            return Row(setup, None, cause(error))
        except BrokenProcessPool:
            return Row(setup, None, "cannot be measured: its process was killed, perhaps for lack of memory")


def _measure_safely(setup: Setup, share: float) -> Measured:
    try:
        return measure(setup, share)
    except (torch.OutOfMemoryError, UserError):
        raise
    except Exception as error:  # of any library: not every exception can be sent to another process
        raise UserError(f"cannot be measured: {type(error).__name__}: {cause(error)}") from None
