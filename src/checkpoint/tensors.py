"""The tensors of a run by name, the same names under every strategy, and how they are read back."""

import warnings
from collections.abc import Iterable, Mapping
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint import HuggingFaceStorageReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from src.process import UserError

warnings.filterwarnings("ignore", "torch.distributed is disabled")  # in a single process, it is meant


def model_tensors(model: nn.Module) -> dict[str, Tensor]:
    """`model.<name>`: parameters, tied ones once, and persistent buffers; under FSDP this process's shards.

    Frozen parameters are not among them: `build_model` makes them as they were, and next to adapters they are large.
    """
    by_identity: dict[int, tuple[str, Tensor]] = {}
    whole = model.module if isinstance(model, DistributedDataParallel) else model
    for name, tensor in whole.state_dict(keep_vars=True).items():
        if not isinstance(tensor, nn.Parameter) or tensor.requires_grad:
            by_identity.setdefault(id(tensor), (f"model.{name}", tensor))
    return dict(by_identity.values())


def run_tensors(model: nn.Module, optimizers: Iterable[Optimizer]) -> dict[str, Tensor]:
    """Those of the model, and `optimizer.<name>.<state>`."""
    tensors = model_tensors(model)
    names = _parameter_names(tensors)
    for optimizer in optimizers:
        for parameter, states in optimizer.state.items():
            for key, state in states.items():
                assert isinstance(state, Tensor), f"{type(optimizer).__name__} keeps {key} as {type(state).__name__}"
                tensors[f"optimizer.{names[id(parameter)]}.{key}"] = state
    return tensors


def own_share(tensors: dict[str, Tensor], rank: int, world_size: int) -> dict[str, Tensor]:
    """What process `rank` saves: its shards, and of what all processes have, such as the whole model under DDP, every
    world_size-th tensor by size. Buffers, which may differ, are the first process's, as DDP goes on with those."""
    dealt = [name for name, tensor in tensors.items() if not isinstance(tensor, DTensor)]
    buffers = {n for n in dealt if n.startswith("model.") and not isinstance(tensors[n], nn.Parameter)}
    dealt = sorted(set(dealt) - buffers, key=lambda name: (-tensors[name].numel(), name))
    elsewhere = {*dealt} - {*dealt[rank::world_size]} | (buffers if rank else set())
    return {name: tensor.detach() for name, tensor in tensors.items() if name not in elsewhere}


def restore(checkpoint: Path, model: nn.Module, optimizers: Iterable[Optimizer]) -> None:
    """Reads the tensors of `run_tensors`, whatever strategy and number of processes wrote them. Collective.

    Raises:
        ValueError: the checkpoint is of another model.
    """
    saved = saved_tensors(checkpoint)
    states_of: dict[str, list[str]] = {}
    for name in saved:
        group, _, rest = name.partition(".")
        if group == "optimizer":
            parameter_name, _, key = rest.rpartition(".")
            states_of.setdefault(parameter_name, []).append(key)
    tensors = model_tensors(model)
    _require_same_model(checkpoint, tensors, saved)
    names = _parameter_names(tensors)
    tensors = {name: tensor.detach() for name, tensor in tensors.items()}
    states: list[dict[int, dict[str, Tensor]]] = []
    for optimizer in optimizers:
        states.append({})
        for number, parameter in enumerate(p for group in optimizer.param_groups for p in group["params"]):
            name = names[id(parameter)]
            for key in states_of.get(name, ()):
                full_name = f"optimizer.{name}.{key}"
                size, dtype = saved[full_name].size, saved[full_name].properties.dtype
                # what has the parameter's shape is sharded as it is; the rest, such as a count, is on all processes
                fresh = (
                    torch.zeros_like(parameter, dtype=dtype, requires_grad=False)
                    if size == parameter.shape and size
                    else torch.zeros(size, dtype=dtype)
                )
                states[-1].setdefault(number, {})[key] = tensors[full_name] = fresh
    read(checkpoint, tensors)
    for optimizer, of_optimizer in zip(optimizers, states, strict=True):
        groups = optimizer.state_dict()["param_groups"]
        optimizer.load_state_dict({"state": of_optimizer, "param_groups": groups})  # puts each on the right device


def read_model(checkpoint: Path, model: nn.Module) -> None:
    """Reads the weights alone, in place. Collective where there are processes.

    Raises:
        ValueError: the checkpoint is of another model.
    """
    tensors = model_tensors(model)
    _require_same_model(checkpoint, tensors, saved_tensors(checkpoint))
    read(checkpoint, {name: tensor.detach() for name, tensor in tensors.items()})


def read(checkpoint: Path, tensors: Mapping[str, Tensor]) -> None:
    """Fills `tensors` with what the checkpoint has under their names. Collective where there are processes."""
    alone = not torch.distributed.is_initialized()
    dcp.load(dict(tensors), storage_reader=HuggingFaceStorageReader(str(checkpoint)), no_dist=alone)


def saved_tensors(checkpoint: Path) -> dict[str, TensorStorageMetadata]:
    """Shape (`size`) and dtype (`properties.dtype`) of each tensor in it, by name, from the heads of its files."""
    found = HuggingFaceStorageReader(str(checkpoint)).read_metadata().state_dict_metadata
    return {name: facts for name, facts in found.items() if isinstance(facts, TensorStorageMetadata)}


def _parameter_names(tensors: Mapping[str, Tensor]) -> dict[int, str]:
    return {id(tensor): name.removeprefix("model.") for name, tensor in tensors.items()}


def _require_same_model(
    checkpoint: Path, model: Mapping[str, Tensor], saved: Mapping[str, TensorStorageMetadata]
) -> None:
    there = {name: tuple(saved[name].size) for name in saved if name.startswith("model.")}
    here = {name: tuple(tensor.shape) for name, tensor in model.items()}
    differing = [name for name in {**here, **there} if here.get(name) != there.get(name)]
    if differing:
        name, others = differing[0], len(differing) - 1
        raise UserError(
            f"{checkpoint} is of another model: {name.removeprefix('model.')} is {there.get(name, 'not there')} in it "
            f"and {here.get(name, 'not there')} in this one" + (f", and {others} more differ" if others else "")
        )
