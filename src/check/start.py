"""Checks 1 and 3, Launch and Same start: what runs is what the accelerate yaml asked for, and all processes have the
weights that one process would begin with."""

import math
import os
from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from src.check.advice import ADVICE
from src.check.findings import Finding, gather
from src.check.subject import Subject, checksum, named_tensors, shard_like
from src.distributed import sharded_units
from src.optim import to_local


def check_launch(subject: Subject) -> Iterator[Finding]:
    """Look at processes and model, not at what the launcher or Accelerate say of them."""
    row, run = partial(Finding, "Launch"), subject.run
    world_size, on_cpu = int(os.environ.get("WORLD_SIZE", "1")), run.device.type == "cpu"
    joined = int(run.accelerator.reduce(torch.ones((), device=run.device), "sum"))
    yield row("processes that see each other", str(joined), f"{world_size}, as started", joined == world_size)
    devices = gather(str(run.device).replace("cpu:0", "cpu"))
    is_bound = not on_cpu and os.environ.get("LOCAL_WORLD_SIZE", "1") == str(world_size)
    yield row(
        "devices",
        ", ".join(f"{devices.count(device)} x {device}" for device in sorted(set(devices))),
        "one each" if is_bound else "",
        not is_bound or len(set(devices)) == run.world_size,
    )
    wants_fsdp = os.environ.get("ACCELERATE_USE_FSDP", "").lower() == "true"  # set by the launcher's own options, too
    wants_fsdp |= run.launch.requested["distributed_type"] == "FSDP"
    wanted = "FSDP" if wants_fsdp else "DDP" if world_size > 1 else "single"
    units = sharded_units(run.model)
    kind = "FSDP" if units else "DDP" if isinstance(run.model, DistributedDataParallel) else "single"
    cause = ADVICE["Launch"]["strategy"].format(wanted)
    yield row("strategy", f"{kind}: {run.launch.strategy}", f"{wanted}, as requested", kind == wanted, cause)
    if run.launch.note:
        yield row("stand-in", run.launch.note)
    local = [to_local(p) for p in run.model.parameters()]
    held = max(gather(sum(p.numel() * p.element_size() for p in local)))
    if units:
        yield from _sharding(subject, units, held)
    else:
        yield row("parameters per process", f"{held / 1e6:,.2f} MB, all of them")


def _sharding(subject: Subject, units: int, held: int) -> Iterator[Finding]:
    """Args:
    held: bytes of parameters, of the process that holds most.
    """
    row, run, parameters = partial(Finding, "Launch"), subject.run, list(subject.reference.parameters())
    blocks, modules = blocks_to_wrap(subject), dict(subject.unwrapped.named_modules())
    wrapped = [name for name in blocks if isinstance(modules[name], FSDPModule)]
    measured = f"{units}, {len(wrapped)} of {len(blocks)} blocks among them"
    is_wrapped = units > 1 and wrapped == blocks
    yield row("sharded units", measured, "all blocks, and the rest", is_wrapped)
    largest = sum(4 * largest_shard(p, run.world_size) for p in parameters)
    total = sum(4 * p.numel() for p in parameters)
    unsharded = [name for name, p in run.model.named_parameters() if not isinstance(p, DTensor)]
    yield row(
        "parameters per process",
        f"{held / 1e6:,.2f} MB of {total / 1e6:,.2f} ({held / total:.1%})",
        f"{largest / 1e6:,.2f} MB",
        held <= largest and not unsharded,
        ADVICE["Launch"]["parameters per process"].format(", ".join(unsharded[:3]) or "some shards"),
    )
    devices = {p.device.type for p in run.model.parameters()}
    wants_offload = os.environ.get("FSDP_OFFLOAD_PARAMS", "false").lower() == "true"
    wanted = "cpu" if wants_offload else run.device.type
    without = " (as they would without offload here)" if run.device.type == "cpu" else ""
    yield row("where the shards live", ", ".join(sorted(devices)) + without, wanted, devices == {wanted})


def largest_shard(parameter: Tensor, world_size: int) -> int:
    """Return the elements of the first process's shard: FSDP divides the first dimension, and fills the other shards up
    to it."""
    return math.ceil(parameter.shape[0] / world_size) * parameter[0].numel() if parameter.ndim else 1


def blocks_to_wrap(subject: Subject) -> list[str]:
    """Return the names of the modules that FSDP is to wrap one by one; none where it goes by their size."""
    if os.environ.get("FSDP_AUTO_WRAP_POLICY", "TRANSFORMER_BASED_WRAP") != "TRANSFORMER_BASED_WRAP":
        return []
    from_yaml = subject.run.accelerator.state.fsdp_plugin.transformer_cls_names_to_wrap
    classes = from_yaml or getattr(subject.reference, "_no_split_modules", None) or []
    return [name for name, module in subject.reference.named_modules() if type(module).__name__ in classes]


def check_start(subject: Subject) -> Iterator[Finding]:
    """Look before the first step. Of what is sharded each process compares its shard, so that the wrong one is named."""
    row = partial(Finding, "Same start")
    sums = gather(checksum([tensor for _, tensor in named_tensors(subject.reference)]))
    is_same = len(set(sums)) == 1
    measured = f"checksum {sums[0]} on all processes" if is_same else f"checksums {', '.join(sums)}"
    yield row("build_model, seeded alike", measured, "the same", is_same)
    found, expected = dict(named_tensors(subject.unwrapped)), dict(named_tensors(subject.reference))
    common = [name for name in expected if name in found]
    differing = sorted(found.keys() ^ expected.keys())
    for name in common:
        shard = to_local(shard_like(expected[name], found[name].detach()))
        if not torch.equal(to_local(found[name].detach()).to(shard.device), shard):
            differing.append(name)
    wrong = [
        f"process {rank}: {names[0]}" + (f" and {len(names) - 1} more differ" if names[1:] else " differs")
        for rank, names in enumerate(gather(differing))
        if names
    ]
    measured = "; ".join(wrong) or f"{len(common)} tensors, as on one process"
    yield row("weights and buffers", measured, f"bitwise, for seed {subject.run.config.seed}", not wrong)
    drawn = gather(subject.rng_checksum)
    is_own = len(set(drawn)) == len(drawn)
    measured = "each process its own" if is_own else "the same on several processes"
    yield row("random numbers from here on", measured, "each its own", is_own)
