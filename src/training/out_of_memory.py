"""Explain in one line why a GPU ran out of memory: what held it, and which changes would help."""

import contextlib
from collections.abc import Iterator

import torch

from src.config.errors import UserError
from src.training.held import tensors_of
from src.training.run import Run

GB = 1e9
HELP = "what would help: --activation_checkpointing=true, a smaller --micro_batch_size or sequence, FSDP on more GPUs"


@contextlib.contextmanager
def explaining_memory(phase: str, run: Run | None = None) -> Iterator[None]:
    """Turn a GPU's out-of-memory error in this phase of a run into a UserError."""
    try:
        yield
    except RuntimeError as error:  # on Apple's GPUs, it is no OutOfMemoryError
        if "out of memory" not in str(error):
            raise
        line, is_cuda = f"out of memory in the {phase}", torch.cuda.is_available()
        if is_cuda:
            free, total = torch.cuda.mem_get_info()
            outside = total - free - torch.cuda.memory_reserved()  # of CUDA itself and of other processes
            line += f", on a GPU of {total / GB:.1f} GB, {outside / GB:.1f} GB outside torch"
        if run and is_cuda:
            held = {name: sum(t.nbytes for t in of if t.is_cuda) for name, of in tensors_of(run).items()}
            held["activations"] = torch.cuda.max_memory_allocated() - sum(held.values())
            line += ": " + ", ".join(f"{name} {size / GB:.1f}" for name, size in held.items())
        raise UserError(f"{line}; {HELP}") from error
