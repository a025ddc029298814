"""The tensors of a run, by names that are the same under every strategy, and how to load them."""

import math
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from accelerate import Accelerator
from accelerate.utils import extract_model_from_parallel, gather_object
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from src.checkpoint.files import reading
from src.config.errors import UserError, listed
from src.distributed.accelerator import num_replicas
from src.tasks.base import Tensors
from src.training.gradients import to_local

warnings.filterwarnings("ignore", "torch.distributed is disabled")  # intended for a single process


def model_tensors(model: nn.Module) -> Tensors:
    """Return trained parameters, tied ones once, and persistent buffers as `model.<name>`; under FSDP, this process's
    shards. Frozen parameters, which dwarf adapters, are left out: `build_model` restores them."""
    unwrapped = extract_model_from_parallel(model)
    # has the persistent buffers, including those of frozen weights, such as the scales of 4-bit weights
    state = unwrapped.state_dict()
    trained = {f"model.{name}": weight for name, weight in unwrapped.named_parameters() if weight.requires_grad}
    return trained | {f"model.{name}": buffer for name, buffer in unwrapped.named_buffers() if name in state}


def run_tensors(model: nn.Module, optimizers: Sequence[Optimizer]) -> Tensors:
    """Return the model's tensors and the optimizers' state, as `optimizer.<name>.<state>`."""
    tensors = model_tensors(model)
    names = {tensor: name.removeprefix("model.") for name, tensor in tensors.items()}
    for optimizer in optimizers:
        for parameter, states in optimizer.state.items():
            for key, state in states.items():
                assert isinstance(state, Tensor), f"{type(optimizer).__name__} keeps {key} as {type(state).__name__}"
                tensors[f"optimizer.{names[parameter]}.{key}"] = state
    return tensors


def rank_state_dict(tensors: Tensors, rank: int, world_size: int) -> Tensors:
    """Return what process `rank` saves: its shards and, of tensors that all processes hold, such as the whole model
    under DDP, every world_size-th by size. Buffers may differ; the first process saves them, as DDP uses its own."""
    replicated = {name for name, tensor in tensors.items() if not isinstance(tensor, DTensor)}
    buffers = {n for n in replicated if n.startswith("model.") and not isinstance(tensors[n], nn.Parameter)}
    shared = sorted(replicated - buffers, key=lambda name: (-tensors[name].numel(), name))
    elsewhere = replicated.difference(shared[rank::world_size], () if rank else buffers)
    return {name: tensor.detach() for name, tensor in tensors.items() if name not in elsewhere}


def load_tensors(checkpoint: Path, model: nn.Module, optimizers: Sequence[Optimizer] = ()) -> None:
    """Load the weights, and the state of `optimizers`, in place, whatever strategy and number of processes saved them.
    Raise a UserError if the checkpoint does not fit this model. Collective."""
    there = {name: f"has shape {tuple(saved.size)}" for name, saved in saved_tensors(checkpoint).items()}
    stateful = {name.rpartition(".")[0] for name in there}  # a parameter that never had a gradient has no state
    for name, parameter in model_tensors(model).items():
        if optimizers and name.replace("model.", "optimizer.", 1) in stateful:
            create_optimizer_state(parameter, optimizers)
    tensors = run_tensors(model, optimizers)
    here = {name: f"has shape {tuple(tensor.shape)}" for name, tensor in tensors.items()}
    found = {name: tensor.detach() for name, tensor in tensors.items() if name in there}
    absent = "is missing"
    if differing := [
        f"{name.removeprefix('model.')} {there.get(name, absent)} in the checkpoint and {here.get(name, absent)} here"
        for name in here | there
        if here.get(name) != there.get(name) and (name in found or name.startswith("model."))
    ]:
        raise UserError(f"{checkpoint} does not fit this model: {listed(differing)}")
    dcp.load(found, storage_reader=StorageReader(str(checkpoint)))
    loaded = {id(tensors[name]) for name in found}
    for optimizer in optimizers:
        for parameter, states in [*optimizer.state.items()]:
            # what the checkpoint lacks, as of another optimizer, begins anew
            if not loaded.issuperset(map(id, states.values())):
                del optimizer.state[parameter]


def create_optimizer_state(parameter: Tensor, optimizers: Sequence[Optimizer]) -> None:
    """Create the optimizers' state of one parameter: gradients of all at once would take another shard's memory."""
    parameter.grad = torch.zeros_like(parameter)
    for optimizer in optimizers:
        if parameter not in optimizer.state:
            optimizer.step()  # loading overwrites the state, and any change to the weights
        optimizer.zero_grad()


class StorageReader(dcp.HuggingFaceStorageReader):
    """DCP's reader, but reopening the file for each tensor: pages read from an open file count as this process's
    memory, and would add up to all that it reads."""

    def read_data(self, plan: dcp.LoadPlan, planner: dcp.LoadPlanner) -> torch.futures.Future[None]:
        for item in plan.items:
            super().read_data(dcp.LoadPlan([item]), planner)
        return super().read_data(dcp.LoadPlan([]), planner)


def saved_tensors(checkpoint: Path) -> dict[str, Any]:
    """Return shape (`size`) and dtype (`properties.dtype`) of each tensor in a checkpoint, from file headers. Raise a
    RunError if one cannot be read."""
    with reading(checkpoint / "shard-*.safetensors"):
        return dcp.HuggingFaceStorageReader(str(checkpoint)).read_metadata().state_dict_metadata


def frozen_norm(model: nn.Module, accelerator: Accelerator | None = None) -> float:
    """Return the L2 norm of all frozen parameters, which identifies them, as they are in no checkpoint. Collective with
    an accelerator."""
    frozen = (to_local(parameter.detach()) for parameter in model.parameters() if not parameter.requires_grad)
    squares = sum(weights.float().square().sum().item() for weights in frozen)
    if accelerator and accelerator.is_fsdp2:
        squares = sum(gather_object([squares])) / num_replicas(accelerator)
    return math.sqrt(squares)
