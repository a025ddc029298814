"""What is done to a model between `build_model` and `prepare`, in the order of `transform`.

Activation checkpointing first: each block's forward becomes one that runs again in the backward pass. Compilation
second, around it, so that the compiler sees the recomputation and can fuse it. DDP or FSDP last, in `prepare`: their
hooks stay outside what is compiled. All of it reassigns `forward` and nothing else, so that names, classes and the
state dict are as the task made them. The blocks are those that FSDP wraps: the model's `_no_split_modules` names them.
"""

import os
import shutil
import sys
from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from src.config.config import Config
from src.config.errors import UserError
from src.distributed.accelerator import context_parallel
from src.training.blocks import repeating_blocks

INPUTS_OF_BLOCKS = r"L\['(args|kwargs)'\]"
"""The inputs of a block as the compiler calls them: those of transformers take (*args, **kwargs)."""


def transform(model: nn.Module, config: Config, accelerator: Accelerator) -> None:
    """Apply what the settings ask for, in place.

    Raises:
        UserError: the model names no blocks, or this machine has no compiler that can do it.
    """
    blocks = repeating_blocks(model)
    if config.activation_checkpointing:
        if not blocks:
            raise UserError(
                f"activation_checkpointing: name the repeating blocks of {type(model).__name__} in its "
                f"_no_split_modules"
            )
        # Activations are computed again in the backward pass, which spares their memory. torch's `checkpoint` restores
        # the random numbers before, so that dropout drops the same units; fsdp_activation_checkpointing does not, and
        # gives wrong gradients.
        for block in blocks:
            block.forward = partial(checkpoint, block.forward, use_reentrant=False)
    if config.compile:
        _require_compiler()
        has_dropout = any(isinstance(module, nn.Dropout) and module.p for module in model.modules())
        if config.activation_checkpointing and has_dropout and torch.__version__ < "2.13":
            hint = "leave out one of the three"
            raise UserError(f"compile: with activation_checkpointing and dropout it needs torch 2.13 or newer: {hint}")
        blocks = [block for block in blocks if any(block.children())]
        # One compilation serves all blocks, however many. Single layers have nothing to fuse: then the whole model.
        # A CPU trains a transformer in bf16 1.14 times as fast with it (docs/figures.md); on a GPU, a step of a Llama
        # of 1.1B launches 1,409 kernels in place of 3,293 (docs/gpu.md).
        data_size = accelerator.num_processes // context_parallel(accelerator).size
        has_rows = config.forward_batch_size(data_size) > 1
        for module in blocks or [model]:
            compiled = torch.compile(module.forward)
            if blocks and has_rows:
                compiled = partial(_forward, module.forward, compiled)
            module.forward = compiled
        # Sizes of inputs are variables from the start. Else torch compiles the first one as a constant, and all of it
        # once more for the second.
        if blocks:
            torch.compiler.config.dynamic_sources = f"{INPUTS_OF_BLOCKS}.*"


def _forward(plain: Callable[..., Any], compiled: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call a block, compiled unless its batch has a single row, left over from larger ones: the compiler takes a size
    of one for a constant, and would compile everything once more."""
    rows = next(len(value) for value in (*args, *kwargs.values()) if isinstance(value, Tensor))
    return (plain if rows == 1 else compiled)(*args, **kwargs)


def _require_compiler() -> None:
    if torch.accelerator.is_available():
        if not find_spec("triton"):
            raise UserError("compile=true needs triton for this GPU: install it, or set compile=false")
    elif not shutil.which(os.environ.get("CXX", "clang++" if sys.platform == "darwin" else "g++")):
        raise UserError("compile=true needs a C++ compiler such as g++: install one, or set compile=false")
