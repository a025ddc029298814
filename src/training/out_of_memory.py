"""Explain in one line why a GPU ran out of memory: what held it, and which changes would help."""

import contextlib
import inspect
import traceback
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from src.config.errors import UserError
from src.training.gradients import local_gradients, to_local
from src.training.run import Run
from src.training.transforms import repeating_blocks

GB = 1e9
PLAN = Path(__file__).parents[1] / "tools" / "plan"
"""Folder of the plan, unless this copy leaves it out."""
HINT = "to see what fits: python -m src.tools.plan -- SETTINGS"


@contextlib.contextmanager
def explaining_memory(phase: str, run: Run | None = None) -> Iterator[None]:
    """Turn a GPU's out-of-memory error in this phase of a run into a UserError. If the task's own file allocated the
    memory, keep the traceback too."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        if hasattr(error, "__notes__"):  # an inner phase has explained it
            raise
        free, total = torch.cuda.mem_get_info()
        outside = total - free - torch.cuda.memory_reserved()  # of CUDA itself and of other processes
        line = f"out of memory in the {phase}, on a GPU of {total / GB:.1f} GB, {outside / GB:.1f} GB outside torch"
        line += _explain(run) if run else ""
        if PLAN.is_dir():
            line += f"; {HINT}"
        *_, (last, _) = traceback.walk_tb(error.__traceback__)
        if run and last.f_code.co_filename == inspect.getfile(type(run.task)):
            error.add_note(f"train.py: {line}")
            raise
        raise UserError(line) from error


def tensors_of(run: Run) -> dict[str, list[Tensor]]:
    """Return this process's tensors by what they are: `parameters`, `gradients` and `optimizer`."""
    states = [state for optimizer in run.optimizers for state in optimizer.state.values()]
    return {
        "parameters": [to_local(parameter) for parameter in run.parameters],
        "gradients": local_gradients(run.parameters),
        "optimizer": [to_local(value) for state in states for value in state.values() if isinstance(value, Tensor)],
    }


def _explain(run: Run) -> str:
    """Return what held the memory, and which changes save some: first of the activations, then of the rest."""
    held = {name: sum(t.nbytes for t in of if t.is_cuda) for name, of in tensors_of(run).items()}
    held["activations"] = torch.cuda.max_memory_allocated() - sum(held.values())

    hints = []
    size = run.config.forward_batch_size(run.data_size)
    if repeating_blocks(run.accelerator.unwrap_model(run.model)) and not run.config.activation_checkpointing:
        hints.append("--activation_checkpointing=true")
    if size > 1:
        hints.append(f"--micro_batch_size={size // 2}")
    elif run.task.splits_sequences:
        hints.append("accelerate_configs/fsdp_cp.yaml")
    hints.append("accelerate_configs/fsdp.yaml on more GPUs")
    if not run.launch.strategy.endswith("offload"):
        hints.append("accelerate_configs/fsdp_offload.yaml")
    holds = ", ".join(f"{name} {size / GB:.1f}" for name, size in held.items())
    return f": {holds}; what would help: {', '.join(hints)}"
