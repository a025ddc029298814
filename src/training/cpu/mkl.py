"""MKL leaves AVX-512 unused on AMD's CPUs: there oneDNN, which is part of torch as well, multiplies in its place.

Sums are then added up in another order. docs/figures.md has the figures, of a Zen 5; on a Zen 4, whose units are half
as wide, both are as fast.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

FEWEST = 2**22
"""Multiplications of a layer; with fewer, the time that Python adds exceeds the gain."""


def is_slow() -> bool:
    """Return whether this CPU is one that MKL is slow on."""
    # Zen 5: 182 GFLOP/s by MKL, 386 by oneDNN. Zen 4 has the same instructions, and both are as fast (docs/figures.md).
    cpu = torch.cpu.get_capabilities()
    is_amd = "AMD" in cpu.get("cpu_name", "")
    return is_amd and bool(cpu.get("avx512_bf16")) and torch.backends.mkldnn.is_available()


class Linear(nn.Linear):
    """Works as nn.Linear in fp32, in half the time if the layer is large."""

    def forward(self, inputs: Tensor) -> Tensor:
        if inputs.ndim < 2 or inputs.numel() * self.out_features < FEWEST:
            return super().forward(inputs)
        return _Linear.apply(inputs, self.weight, self.bias)


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, inputs: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(inputs, weight)
        return _mm(inputs, weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        inputs, weight = ctx.saved_tensors
        needs_inputs, needs_weight, needs_bias = ctx.needs_input_grad
        rows = gradient.flatten(0, -2)
        return (
            _mm(gradient, weight.t()) if needs_inputs else None,
            # gradient.T @ inputs: _mm transposes its second operand
            _mm(rows.t(), inputs.flatten(0, -2).t()) if needs_weight else None,
            rows.sum(0) if needs_bias else None,
        )


# an operator of its own, as torch's compiler would take `right` for a constant
@torch.library.custom_op("cpu::mm", mutates_args=())
def _mm(left: Tensor, right: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return left @ right.T + bias, fp32, by the only operator for ordinary tensors that calls oneDNN."""
    return torch.ops.mkldnn._linear_pointwise(left, right, bias, "none", [], "")


@_mm.register_fake
def _(left: Tensor, right: Tensor, bias: Tensor | None = None) -> Tensor:
    return left.new_empty(*left.shape[:-1], len(right))
