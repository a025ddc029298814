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
from src.check.findings import Row, finding, gather
from src.check.subject import Subject, checksum, named_tensors, shard_like
from src.distributed import sharded_units
from src.launch_guard import is_set
from src.optim import to_local


def check_launch(subject: Subject) -> Iterator[Row]:
    """Look at processes and model, not at what the launcher or Accelerate say of them."""
    row, run, on_cpu = partial(finding, "Launch"), subject.run, subject.run.device.type == "cpu"
    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    joined = int(run.accelerator.reduce(torch.ones((), device=run.device), "sum"))
    yield row("processes that see each other", str(joined), f"{world_size}, as started", joined == world_size)
    devices = gather(str(run.device).replace("cpu:0", "cpu"))
    is_bound = not on_cpu and os.environ.get("LOCAL_WORLD_SIZE", "1") == str(world_size)
    measured = ", ".join(f"{devices.count(device)} x {device}" for device in sorted(set(devices)))
    yield row("devices", measured, "one each" if is_bound else "", len(set(devices)) == run.world_size)
    wants_fsdp = is_set("ACCELERATE_USE_FSDP")  # set by the launcher's own options, too
    wants_fsdp |= run.launch.requested["distributed_type"] == "FSDP"
    wanted = "FSDP" if wants_fsdp else "DDP" if world_size > 1 else "single"
    units = sharded_units(run.model)
    kind = "FSDP" if units else "DDP" if isinstance(run.model, DistributedDataParallel) else "single"
    cause = ADVICE["Launch"]["strategy"].format(wanted)
    yield row("strategy", f"{kind}: {run.launch.strategy}", f"{wanted}, as requested", kind == wanted, cause)
    if run.launch.note:
        yield row("stand-in", run.launch.note)
    held = max(gather(sum(p.numel() * p.element_size() for p in map(to_local, run.model.parameters())))) / 1e6
    if not units:
        yield row("parameters per process", f"{held:,.2f} MB, all of them")
        return
    blocks, modules = blocks_to_wrap(subject), dict(subject.unwrapped.named_modules())
    wrapped = [name for name in blocks if isinstance(modules[name], FSDPModule)]
    measured = f"{units}, {len(wrapped)} of {len(blocks)} blocks among them"
    yield row("sharded units", measured, "all blocks, and the rest", units > 1 and wrapped == blocks)
    total = sum(4 * p.numel() for p in subject.reference.parameters()) / 1e6
    largest = sum(4 * largest_shard(p, run.world_size) for p in subject.reference.parameters()) / 1e6
    unsharded = [name for name, p in run.model.named_parameters() if not isinstance(p, DTensor)]
    measured = f"{held:,.2f} MB of {total:,.2f} ({held / total:.1%})"
    cause = ADVICE["Launch"]["parameters"].format(", ".join(unsharded[:3]) or "some shards")
    is_sharded = held <= largest and not unsharded
    yield row("parameters per process", measured, f"{largest:,.2f} MB", is_sharded, cause)
    places = {p.device.type for p in run.model.parameters()}
    wants_offload = is_set("FSDP_OFFLOAD_PARAMS")
    wanted = "cpu" if wants_offload else run.device.type
    measured = ", ".join(sorted(places)) + (" (as they would without offload here)" if on_cpu else "")
    yield row("where the shards live", measured, wanted, places == {wanted})


def largest_shard(parameter: Tensor, world_size: int) -> int:
    """Return the elements of the first process's shard: FSDP divides the first dimension, and pads the other shards."""
    return math.ceil(parameter.shape[0] / world_size) * parameter[0].numel() if parameter.ndim else 1


def blocks_to_wrap(subject: Subject) -> list[str]:
    """Return the names of the modules that FSDP is to wrap one by one; none where it goes by their size."""
    if os.environ.get("FSDP_AUTO_WRAP_POLICY", "TRANSFORMER_BASED_WRAP") != "TRANSFORMER_BASED_WRAP":
        return []
    from_yaml = subject.run.accelerator.state.fsdp_plugin.transformer_cls_names_to_wrap
    classes = from_yaml or getattr(subject.reference, "_no_split_modules", None) or []
    return [name for name, module in subject.reference.named_modules() if type(module).__name__ in classes]


def check_start(subject: Subject) -> Iterator[Row]:
    """Look before the first step. Of what is sharded each process compares its shard: the wrong one is named."""
    row = partial(finding, "Same start")
    found, expected = named_tensors(subject.unwrapped), named_tensors(subject.reference)
    sums = gather(checksum(list(expected.values())))
    is_same = len(set(sums)) == 1
    measured = f"checksum {sums[0]} on all processes" if is_same else f"checksums {', '.join(sums)}"
    yield row("build_model, seeded alike", measured, "the same", is_same)
    common = [name for name in expected if name in found]
    differing = sorted(found.keys() ^ expected.keys())
    for name in common:
        shard = to_local(shard_like(expected[name], found[name]))
        if not torch.equal(to_local(found[name]).to(shard.device), shard):
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
