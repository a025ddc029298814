"""Check 1, Launch: is what runs what the accelerate yaml asked for?"""

import math
import os
from collections.abc import Iterator

import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from src.check.findings import Finding
from src.check.subject import Reference, Subject
from src.launch import sharded_units
from src.optim import to_local


def examine(subject: Subject, reference: Reference) -> Iterator[Finding]:
    """Looks at processes and model, not at what the launcher or Accelerate say of them."""
    requested, world_size = subject.launch.requested["distributed_type"], int(os.environ.get("WORLD_SIZE", "1"))
    joined = subject.accelerator.reduce(torch.ones((), device=subject.device), "sum")
    yield Finding(
        "Launch",
        "processes that see each other",
        f"{int(joined)}",
        f"{world_size}, as started",
        int(joined) == world_size,
        "each process trains a model of its own: the launcher and the script disagree about what a distributed run is",
    )
    places = subject.gather(str(subject.device).replace("cpu:0", "cpu"))
    shared = subject.device.type != "cpu" and len(set(places)) < subject.accelerator.num_processes
    one_machine = int(os.environ.get("LOCAL_WORLD_SIZE", "1")) == world_size
    yield Finding(
        "Launch",
        "devices",
        ", ".join(f"{places.count(place)} x {place}" for place in sorted(set(places))),
        "one each" if subject.device.type != "cpu" and one_machine else "",
        not (shared and one_machine),
        "processes share a device: each must take the one of its LOCAL_RANK",
    )
    wants_fsdp = os.environ.get("ACCELERATE_USE_FSDP", "").lower() == "true"  # set by the launcher's own options, too
    wanted = "FSDP" if wants_fsdp or requested == "FSDP" else "DDP" if world_size > 1 else "single"
    units = sharded_units(subject.model)
    kind = "FSDP" if units else "DDP" if isinstance(subject.model, DistributedDataParallel) else "single"
    yield Finding(
        "Launch",
        "strategy",
        f"{kind}: {subject.launch.strategy}",
        f"{wanted}, as requested",
        kind == wanted,
        f"the yaml asks for {wanted}, and it was not applied: look for keys that Accelerate ignores, variables "
        "ACCELERATE_* in the environment, and a model that was not passed through prepare()",
    )
    if note := subject.launch.note:
        yield Finding("Launch", "stand-in", note)
    if units:
        yield from _sharding(subject, reference, units)
    else:
        held = _held_bytes(subject)
        yield Finding("Launch", "parameters per process", f"{held / 1e6:,.2f} MB, all of them")


def _sharding(subject: Subject, reference: Reference, units: int) -> Iterator[Finding]:
    blocks, wrapped = blocks_to_wrap(subject, reference), dict(subject.bare().named_modules())
    bare = [name for name in blocks if not isinstance(wrapped[name], FSDPModule)]
    yield Finding(
        "Launch",
        "sharded units",
        f"{units}, {len(blocks) - len(bare)} of {len(blocks)} blocks among them",
        "all blocks, and the rest",
        units > 1 and not bare,
        "only the root is wrapped, or some blocks are not: what is not wrapped is gathered all at once, and stays. "
        "Name the repeating blocks in the model's _no_split_modules",
    )
    parameters = list(reference.model.parameters())
    largest = sum(4 * largest_shard(p, subject.world_size) for p in parameters)
    held = _held_bytes(subject)
    whole = sum(p.numel() * 4 for p in parameters)
    unsharded = [name for name, p in subject.model.named_parameters() if not isinstance(p, DTensor)]
    yield Finding(
        "Launch",
        "parameters per process",
        f"{held / 1e6:,.2f} MB of {whole / 1e6:,.2f} ({held / whole:.1%})",
        f"{largest / 1e6:,.2f} MB",
        held <= largest and not unsharded,
        f"not all is sharded: {', '.join(unsharded[:3]) or 'some shards'} " + "takes more than its share",
    )
    places = {p.device.type for p in subject.model.parameters()}
    wants_offload = os.environ.get("FSDP_OFFLOAD_PARAMS", "false").lower() == "true"
    wanted = "cpu" if wants_offload or subject.device.type == "cpu" else subject.device.type
    yield Finding(
        "Launch",
        "where the shards live",
        ", ".join(sorted(places)) + (" (as they would without offload here)" * (subject.device.type == "cpu")),
        wanted,
        places == {wanted},
        "the yaml's fsdp_offload_params was not applied",
    )


def largest_shard(parameter: Tensor, world_size: int) -> int:
    """Elements of the first process's shard: FSDP divides the first dimension, and fills the other shards up to it."""
    return math.ceil(parameter.shape[0] / world_size) * parameter[0].numel() if parameter.ndim else 1


def blocks_to_wrap(subject: Subject, reference: Reference) -> list[str]:
    """The names of the modules that FSDP is to wrap one by one; none where it goes by their size."""
    if os.environ.get("FSDP_AUTO_WRAP_POLICY", "TRANSFORMER_BASED_WRAP") != "TRANSFORMER_BASED_WRAP":
        return []
    from_yaml = subject.accelerator.state.fsdp_plugin.transformer_cls_names_to_wrap
    classes = from_yaml or getattr(reference.model, "_no_split_modules", None) or []
    return [name for name, module in reference.model.named_modules() if type(module).__name__ in classes]


def _held_bytes(subject: Subject) -> int:
    """Of parameters, by the process that holds most."""
    local = [to_local(p) for p in subject.model.parameters()]
    return max(subject.gather(sum(tensor.numel() * tensor.element_size() for tensor in local)))
