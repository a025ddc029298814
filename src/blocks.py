"""What is done to a model block by block. The blocks are those that FSDP wraps: `_no_split_modules` names them."""

import functools

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from src.process import UserError


def repeating_blocks(model: nn.Module) -> list[nn.Module]:
    """The modules of the classes that the model's `_no_split_modules` names; none where it has no such list."""
    names = getattr(model, "_no_split_modules", None) or []
    return [module for module in model.modules() if type(module).__name__ in names]


def checkpoint_activations(model: nn.Module) -> None:
    """Each block keeps its inputs only, and computes its activations again in the backward pass: less memory, a third
    more time. In place; dropout draws the same numbers both times, unlike with fsdp_activation_checkpointing.

    Raises:
        ValueError: the model names no blocks.
    """
    blocks = repeating_blocks(model)
    if not blocks:
        raise UserError(
            f"activation_checkpointing: name the repeating blocks of {type(model).__name__} in its _no_split_modules"
        )
    for block in blocks:
        block.forward = functools.partial(checkpoint, block.forward, use_reentrant=False)


def compile_blocks(model: nn.Module) -> None:
    """Compiles in place: the blocks, one compilation for all of them, or the model where its blocks are single layers.

    Raises:
        ValueError: there is no compiler for this device.
    """
    _require_compiler()
    blocks = [block for block in repeating_blocks(model) if any(block.children())]
    for module in blocks or [model]:
        module.forward = torch.compile(module.forward)  # not the module: FSDP's hooks stay outside


def _require_compiler() -> None:
    if torch.accelerator.is_available():
        from torch.utils._triton import has_triton

        if not has_triton():
            raise UserError("compile=true needs triton for this GPU: install it, or set compile=false")
        return
    from torch._inductor.cpp_builder import get_cpp_compiler
    from torch._inductor.exc import InvalidCxxCompiler

    try:
        get_cpp_compiler()
    except InvalidCxxCompiler as error:
        raise UserError("compile=true needs a C++ compiler such as g++: install one, or set compile=false") from error
