"""Which strategies and numbers of GPUs a run fits on, each tried in a process of its own."""

import multiprocessing
import os
import tempfile
import traceback
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from src.config.config import Config
from src.config.errors import UserError
from src.config.terminal import bar
from src.tools.plan.arithmetic import calculate
from src.tools.plan.gpus import Gpu
from src.tools.plan.measure import Measured, Setup, measure

YAMLS = ("single_gpu", "ddp", "fsdp_grad_op", "fsdp", "hsdp", "fsdp_offload")
"""The strategies that are shipped."""
CHANGES: dict[str, list[str]] = {
    "activation checkpointing": ["--activation_checkpointing=true"],  # room: compile
    "LoRA": ["--task.lora.r=16"],  # room: text
    "LoRA, activation checkpointing": ["--task.lora.r=16", "--activation_checkpointing=true"],  # room: compile+text
    "LoRA on 4 bits": ["--task.lora.r=16", "--task.lora.base_dtype=nf4"],  # room: four_bit+text
}
"""What is tried where nothing fits; offloading is a strategy."""
FORK: Any = multiprocessing.get_context("fork")
"""Processes start with all that has been imported."""


@dataclass
class Row:
    """What was found out about a Setup."""

    setup: Setup
    change: str = ""
    """The one of CHANGES that was made."""
    measured: Measured | None = None
    """With micro-batches that fit or, if none do, with the smallest; None: it can't be run."""
    is_fitting: bool = False
    reason: str = ""
    """The reason why it can't be run."""


def setups(config: Config, arguments: list[str], yamls: list[str], sizes: list[int], gpu: Gpu) -> Iterator[Setup]:
    """Yield the run under each strategy on each number of GPUs that it is for."""
    for gpus in sorted({*sizes}):
        machines = gpus / gpu.gpus_per_machine
        possible = {"single_gpu": gpus == 1, "fsdp_offload": True, "hsdp": machines > 1 and machines % 1 == 0}
        for yaml in yamls:
            if possible.get(yaml, gpus > 1):
                yield Setup(tuple(arguments), f"accelerate_configs/{yaml}.yaml", gpus, gpu)


def changes(config: Config) -> list[tuple[str, list[str]]]:
    """Return those of CHANGES that the run can make: their names, and arguments to add."""
    settings = config.task.model_dump()
    impossible = []
    if "lora" not in settings or not settings["model"] or settings["lora"]["r"]:
        impossible.append("LoRA")
    if config.activation_checkpointing:  # room: compile
        impossible.append("activation checkpointing")
    return [change for change in CHANGES.items() if not any(name in change[0] for name in impossible)]


def explore_all(rows: list[Row]) -> list[Row]:
    """Return the rows with what was found out, in their order."""
    workers = max(1, min(len(rows), len(os.sched_getaffinity(0))))
    with ProcessPoolExecutor(workers, FORK) as pool, bar("setups tried", total=len(rows)) as progress:
        futures = [pool.submit(explore, row) for row in rows]
        for _ in as_completed(futures):
            progress.update()
    return [future.result() for future in futures]


def explore(row: Row) -> Row:
    """Find the largest micro-batches that fit; where the run's own don't, what they would need."""
    try:
        own = attempt(row.setup)
        if own:
            return replace(row, measured=own, is_fitting=True)
        needed = attempt(replace(row.setup, is_limited=False))
        assert needed
        size = needed.largest
        while size:
            smaller = attempt(replace(row.setup, micro_batch=size))
            if smaller:
                return replace(row, measured=smaller, is_fitting=True)
            size //= 2  # of what fits without fragmentation
        if needed.micro_batch > 1:
            needed = attempt(replace(row.setup, is_limited=False, micro_batch=1))
        return replace(row, measured=needed)
    except UserError as error:
        return replace(row, reason=str(error))


def attempt(setup: Setup) -> Measured | None:
    """Measure in a process of its own; None: it was out of memory. Raise a UserError if the run refuses its settings,
    and a RuntimeError with what the process wrote if it fails."""
    with tempfile.TemporaryFile("w+") as log:
        receiver, sender = FORK.Pipe(duplex=False)
        process = FORK.Process(target=_attempt, args=(setup, sender, log.fileno()))
        process.start()
        sender.close()
        try:
            found = receiver.recv()
        except EOFError:
            log.seek(0)
            raise RuntimeError(f"{setup.yaml} on {setup.gpus} GPUs:\n{log.read()}") from None
        finally:
            process.join()
    if isinstance(found, UserError):
        raise found
    return found


def _attempt(setup: Setup, sender: Connection, log: int) -> None:
    os.dup2(log, 2)
    try:
        sender.send(measure(setup) if "NULL_GPU_GIB" in os.environ else calculate(setup))
    except torch.OutOfMemoryError:
        sender.send(None)
    except UserError as error:
        sender.send(error)
    except Exception:
        traceback.print_exc()
    os._exit(0)  # the other processes of the run would be waited for


def yaml_for(setup: Setup) -> str:
    """Return the yaml to launch with: for several machines, one that says so, if there is one."""
    path = Path(setup.yaml)
    several = path.with_name(f"multi_node_{path.name}")
    return str(several if setup.gpus > setup.gpu.gpus_per_machine and several.exists() else path)
