"""Which strategies and numbers of GPUs a run fits on, each tried in a process of its own."""

import math
import multiprocessing
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, replace
from typing import Any

import torch

from src.config.config import Config
from src.config.errors import UserError, cause
from src.config.terminal import bar
from src.tools.plan.gpus import Gpu
from src.tools.plan.measure import Measured, Setup, measure

YAMLS = ("single_gpu", "ddp", "fsdp_grad_op", "fsdp", "hsdp", "fsdp_offload")
"""The strategies that are tried unless others are named."""
CP_YAML = "fsdp_cp"
"""The strategy for sequences that are too long for a GPU: tried where it is named, or none of the others fits."""
CHANGES: dict[str, list[str]] = {
    "activation checkpointing": ["--activation_checkpointing=true"],
    "LoRA": ["--task.lora.r=16"],  # room: text
    "LoRA, activation checkpointing": ["--task.lora.r=16", "--activation_checkpointing=true"],  # room: text
    "LoRA on 4 bits": ["--task.lora.r=16", "--task.lora.base_dtype=nf4"],  # room: text
}
"""What is tried where nothing fits; offloading is a strategy."""
FORK: Any = multiprocessing.get_context("fork")
"""Processes start with all that has been imported."""


@dataclass(frozen=True)
class Row:
    """What was found out about a Setup."""

    setup: Setup
    measured: Measured | None
    """With micro-batches that fit or, if none do, with the smallest; None: it can't be run."""
    reason: str = ""
    """The reason why it can't be run."""

    @property
    def is_fitting(self) -> bool:
        """Return whether some micro-batch fits."""
        return bool(self.measured and self.measured.largest)


def setups(arguments: list[str], yamls: list[str], sizes: list[int], gpu: Gpu) -> Iterator[Setup]:
    """Yield the run under each strategy on each number of GPUs that it is for."""
    for gpus in sorted({*sizes}):
        possible = {"single_gpu": gpus == 1, "fsdp_offload": True, "hsdp": gpus > gpu.gpus_per_machine}
        shareable = math.gcd(gpus, gpu.gpus_per_machine)  # those that share sequences are in one machine
        for yaml in yamls:
            setup = Setup(tuple(arguments), f"accelerate_configs/{yaml}.yaml", gpus, gpu)
            if yaml == CP_YAML:
                yield from (replace(setup, cp_size=2**i) for i in range(1, 8) if shareable % 2**i == 0)
            elif possible.get(yaml, gpus > 1):
                yield setup


def changed(setups: list[Setup], config: Config) -> Iterator[Setup]:
    """Yield the setups with each of CHANGES that the run can make."""
    settings = config.task.model_dump()
    impossible = []
    if "lora" not in settings or not settings["model"] or settings["lora"]["r"]:
        impossible.append("LoRA")
    if config.activation_checkpointing:
        impossible.append("activation checkpointing")
    for change, arguments in CHANGES.items():
        if not any(name in change for name in impossible):
            for setup in setups:
                yield replace(setup, arguments=(*setup.arguments, *arguments), change=change)


def explore(setup: Setup) -> Row:
    """Find out what a setup takes, or why it can't be run."""
    share = 1.0
    while True:
        try:
            with ProcessPoolExecutor(1, FORK) as pool:
                return Row(setup, pool.submit(_measured, setup, share).result())
        except torch.OutOfMemoryError:
            share -= 0.05  # fragmentation takes the rest
        except UserError as error:
            return Row(setup, None, cause(error))
        except BrokenProcessPool:
            return Row(setup, None, "cannot be measured, its process was killed: by the system, if memory ran out")


def _measured(setup: Setup, share: float) -> Measured:
    try:
        return measure(setup, share)
    except (torch.OutOfMemoryError, UserError):
        raise
    except Exception as error:  # of any library, and not all of them could be sent to the plan's process
        raise UserError(f"cannot be measured, {type(error).__name__}: {cause(error)}") from None


def explore_all(setups: list[Setup]) -> list[Row]:
    """Return what was found out about each, one after the other: the host's time is measured too."""
    return [explore(setup) for setup in bar("setups tried", iterable=setups, total=len(setups))]
