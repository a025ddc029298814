"""What is done to a model between `build_model` and `prepare`, in the order of `transform`.

Activation checkpointing first: each block's forward becomes one that runs again in the backward pass. Compilation
second, around it, so that the compiler sees the recomputation and can fuse it. DDP or FSDP last, in `prepare`: their
hooks stay outside what is compiled. All of it reassigns `forward` and nothing else, so that names, classes and the
state dict are as the task made them. The blocks are those that FSDP wraps: the model's `_no_split_modules` names them.

CUDA graphs are the compiler's (mode="reduce-overhead"): it records a graph for each shape of input, replays it, and
skips it by itself where that would be wrong. https://docs.pytorch.org/docs/stable/generated/torch.compile.html
"""

import os
import shutil
import sys
from functools import partial
from importlib.util import find_spec

import torch
from accelerate import Accelerator
from torch import nn
from torch.utils.checkpoint import checkpoint

from src.config import Config
from src.process import UserError


def transform(model: nn.Module, config: Config, accelerator: Accelerator) -> None:
    """Apply what the settings ask for, in place.

    Raises:
        UserError: the model names no blocks, this machine has no compiler, or no GPU for CUDA graphs.
    """
    blocks = repeating_blocks(model)
    if config.activation_checkpointing:
        if not blocks:
            raise UserError(
                f"activation_checkpointing: name the repeating blocks of {type(model).__name__} in its "
                f"_no_split_modules"
            )
        for block in blocks:  # dropout draws the same numbers both times, unlike with fsdp_activation_checkpointing
            block.forward = partial(checkpoint, block.forward, use_reentrant=False)
    if config.cuda_graphs and (accelerator.device.type != "cuda" or accelerator.use_distributed):
        raise UserError("cuda_graphs=true is for one process on one NVIDIA GPU: use single_gpu.yaml, or leave it out")
    if config.cuda_graphs and config.accumulation(1) > 1:  # a replay overwrites the previous gradients
        raise UserError("cuda_graphs=true cannot accumulate gradients: leave micro_batch_size out")
    if config.compile or config.cuda_graphs:
        _require_compiler()
        mode = "reduce-overhead" if config.cuda_graphs else None
        # one compilation for all blocks; the whole model where its blocks are single layers
        for module in [block for block in blocks if any(block.children())] or [model]:
            module.forward = torch.compile(module.forward, mode=mode)


def repeating_blocks(model: nn.Module) -> list[nn.Module]:
    """Return the modules of the classes in the model's `_no_split_modules`; none if it has no such list."""
    names = getattr(model, "_no_split_modules", None) or []
    return [module for module in model.modules() if type(module).__name__ in names]


def _require_compiler() -> None:
    if torch.accelerator.is_available():
        if not find_spec("triton"):
            raise UserError("compile=true needs triton for this GPU: install it, or set compile=false")
    elif not shutil.which(os.environ.get("CXX", "clang++" if sys.platform == "darwin" else "g++")):
        raise UserError("compile=true needs a C++ compiler such as g++: install one, or set compile=false")
