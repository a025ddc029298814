"""The tensors of a run by name, the same names under every strategy, and how they are read back."""

import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from accelerate import Accelerator
from torch import Tensor, nn
from torch.distributed.checkpoint import HuggingFaceStorageReader
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from src.config.errors import UserError
from src.distributed.accelerator import num_replicas
from src.tasks.base import Tensors
from src.training.gradients import to_local

warnings.filterwarnings("ignore", "torch.distributed is disabled")  # intended in a single process


def model_tensors(model: nn.Module) -> Tensors:
    """Return parameters, tied ones once, and persistent buffers as `model.<name>`; under FSDP this process's shards.
    Leave out frozen parameters: `build_model` makes them as they were, and they dwarf adapters."""
    unwrapped = model.module if isinstance(model, DistributedDataParallel) else model
    # it names the persistent buffers, and what belongs to frozen weights, such as the scales of those in 4 bits
    state = unwrapped.state_dict()
    trained = {f"model.{name}": weight for name, weight in unwrapped.named_parameters() if weight.requires_grad}
    return trained | {f"model.{name}": buffer for name, buffer in unwrapped.named_buffers() if name in state}


def run_tensors(model: nn.Module, optimizers: Sequence[Optimizer]) -> Tensors:
    """Return the model's tensors and the optimizers' state, as `optimizer.<name>.<state>`."""
    tensors = model_tensors(model)
    names = {id(tensor): name.removeprefix("model.") for name, tensor in tensors.items()}
    for optimizer in optimizers:
        for parameter, states in optimizer.state.items():
            for key, state in states.items():
                assert isinstance(state, Tensor), f"{type(optimizer).__name__} keeps {key} as {type(state).__name__}"
                tensors[f"optimizer.{names[id(parameter)]}.{key}"] = state
    return tensors


def rank_state_dict(tensors: Tensors, rank: int, world_size: int) -> Tensors:
    """Return what process `rank` saves: its shards and, of what all processes hold, such as the whole model under DDP,
    every world_size-th tensor by size. Buffers, which may differ, are the first process's, as DDP uses those."""
    replicated = [name for name, tensor in tensors.items() if not isinstance(tensor, DTensor)]
    buffers = {n for n in replicated if n.startswith("model.") and not isinstance(tensors[n], nn.Parameter)}
    dealt = sorted(set(replicated) - buffers, key=lambda name: (-tensors[name].numel(), name))
    elsewhere = {*dealt} - {*dealt[rank::world_size]} | (buffers if rank else set())
    return {name: tensor.detach() for name, tensor in tensors.items() if name not in elsewhere}


def load_tensors(checkpoint: Path, model: nn.Module, optimizers: Sequence[Optimizer] = ()) -> None:
    """Read the weights, and the state of `optimizers`, in place, whatever strategy and number of processes wrote them;
    raise a UserError if the checkpoint is of another model. Collective."""
    saved, own = saved_tensors(checkpoint), model_tensors(model)
    there = {name: tuple(saved[name].size) for name in saved if name.startswith("model.")}
    here = {name: tuple(tensor.shape) for name, tensor in own.items()}
    if differing := [name for name in {**here, **there} if here.get(name) != there.get(name)]:
        name, others = differing[0], len(differing) - 1
        raise UserError(
            f"{checkpoint} is of another model: {name.removeprefix('model.')} is {there.get(name, 'not there')} in it "
            f"and {here.get(name, 'not there')} in this one" + (f", and {others} more differ" if others else "")
        )
    stateful = {name.rpartition(".")[0] for name in saved}  # not of parameters that never had a gradient
    for name, parameter in own.items():
        if optimizers and name.replace("model.", "optimizer.", 1) in stateful:
            create_optimizer_state(parameter, optimizers)
    tensors = run_tensors(model, optimizers)
    read(checkpoint, {name: tensor.detach() for name, tensor in tensors.items() if name in saved})


def create_optimizer_state(parameter: Tensor, optimizers: Sequence[Optimizer]) -> None:
    """Have the optimizers make their state of one parameter: of all at once, the gradients would be a share more."""
    parameter.grad = torch.zeros_like(parameter)
    for optimizer in optimizers:
        optimizer.step()  # what is read overwrites the state, and the weights, if that changes them
        optimizer.zero_grad()


def read(checkpoint: Path, tensors: Tensors) -> None:
    """Fill `tensors` with what the checkpoint has under their names. Collective if there are several processes."""
    dcp.load(dict(tensors), storage_reader=StorageReader(str(checkpoint)))


class StorageReader(HuggingFaceStorageReader):
    """DCP's reader, which opens the files for each tensor again: what was read of an open one counts as memory of this
    process, and would be as much as all that it reads."""

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> torch.futures.Future[None]:
        for item in plan.items:
            super().read_data(LoadPlan([item]), planner)
        return super().read_data(LoadPlan([]), planner)


def saved_tensors(checkpoint: Path) -> dict[str, Any]:
    """Return shape (`size`) and dtype (`properties.dtype`) of each tensor in it by name, from its files' headers."""
    return HuggingFaceStorageReader(str(checkpoint)).read_metadata().state_dict_metadata


def frozen_norm(model: nn.Module, accelerator: Accelerator | None = None) -> float:
    """Return the L2 norm over all parameters that are not trained. It identifies them, as no checkpoint holds them.
    Collective if an accelerator has sharded them."""
    squares = torch.zeros((), dtype=torch.float64)
    for parameter in model.parameters():
        if not parameter.requires_grad:
            squares += to_local(parameter.detach()).float().square().sum().double().cpu()
    if accelerator and accelerator.is_fsdp2:
        squares = accelerator.reduce(squares.to(accelerator.device), "sum").cpu() / num_replicas(accelerator)
    return squares.sqrt().item()
