"""MKL leaves AVX-512 unused on AMD's CPUs: there oneDNN, which is part of torch as well, multiplies in its place."""

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

FEWEST = 2**22
"""Multiplications of a linear layer; where there are fewer, what Python adds takes longer than is gained."""
LONGEST = 512
"""Tokens. Products keep each pair's probability for the backward pass: at this length 6 MiB for a sequence and 12
heads, in each layer."""


def avoid_mkl(model: nn.Module, device: str, precision: str, longest: int | None = None) -> bool:
    """In fp32, large linear layers then take half the time; changes the model in place. In bf16, where only torch's
    fused attention asks MKL, attention as products takes a fifth (32 tokens) to half the time (512); changes a setting
    of this process. Sums are then added up in another order, and attention's scores are rounded to bf16.
    docs/upstream.md has the figures.

    Args:
        device: its type.
        precision: of Launch.
        longest: tokens in the longest sequence; None where there is no attention.

    Returns:
        Whether it did.
    """
    cpu = torch.cpu.get_capabilities() if device == "cpu" else {}
    if "AMD" not in cpu.get("cpu_name", "") or not cpu.get("avx512_bf16") or not torch.backends.mkldnn.is_available():
        return False
    if precision == "fp32":
        layers = [module for module in model.modules() if type(module) is nn.Linear]
        for layer in layers:
            layer.forward = partial(_forward, layer)  # type: ignore[method-assign]
        return bool(layers)
    if precision == "bf16" and longest is not None and longest <= LONGEST:
        torch.backends.cuda.enable_flash_sdp(False)  # these two hold for the CPU as well
        torch.backends.cuda.allow_fp16_bf16_reduction_math_sdp(True)
        return True
    return False


def _forward(layer: nn.Linear, inputs: Tensor) -> Tensor:
    if inputs.ndim < 2 or inputs.numel() * layer.out_features < FEWEST:
        return F.linear(inputs, layer.weight, layer.bias)
    return _Linear.apply(inputs, layer.weight, layer.bias)


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, inputs: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(inputs, weight)
        return _product(inputs, weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        inputs, weight = ctx.saved_tensors
        of_inputs, of_weight, of_bias = ctx.needs_input_grad
        rows = gradient.flatten(0, -2)
        return (
            _product(gradient, weight.t()) if of_inputs else None,
            _product(rows.t(), inputs.flatten(0, -2).t()) if of_weight else None,
            rows.sum(0) if of_bias else None,
        )


@torch.library.custom_op("train::product", mutates_args=())  # torch's compiler would take `right` for a constant
def _product(left: Tensor, right: Tensor, added: Tensor | None = None) -> Tensor:
    """left @ right.T + added, in fp32: the only operator for ordinary tensors that asks oneDNN."""
    return torch.ops.mkldnn._linear_pointwise(left, right, added, "none", [], "")


@_product.register_fake
def _(left: Tensor, right: Tensor, added: Tensor | None = None) -> Tensor:
    return left.new_empty(*left.shape[:-1], len(right))
