"""The cross-entropy of a linear layer's outputs, a few rows of them at a time; its gradients come with it.

So the logits are computed once, and never are there all at once. torch's F.linear_cross_entropy does the same, but in
half precision it rounds the loss, and sums the weight's gradient over the chunks in that precision.
"""

import os
import shutil
from collections.abc import Callable
from functools import cache
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        states: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        scale: float,
        softcap: float | None,
        rows: int,
    ) -> Tensor:
        device = states.device.type
        caster = device if torch.amp.is_autocast_available(device) else "cpu"  # the meta device has none
        dtype = torch.get_autocast_dtype(caster) if torch.is_autocast_enabled(caster) else states.dtype

        def rounded(tensor: Tensor) -> Tensor:  # on a CPU products of half precision have sums of half precision
            return tensor.to(dtype) if device == "cuda" else tensor.to(dtype).float()

        wants_states, wants_weight, wants_bias = ctx.needs_input_grad[:3]
        states_grad = torch.empty_like(states) if wants_states else None
        weight_grad = torch.zeros_like(weight, dtype=torch.float32) if wants_weight else None
        bias_grad = torch.zeros_like(bias, dtype=torch.float32) if wants_bias and bias is not None else None
        ctx.scale = scale
        loss = states.new_zeros((), dtype=torch.float32)
        with torch.autocast(caster, enabled=False):
            weight = rounded(weight)
            for start in range(0, len(states), rows):
                part = slice(start, start + rows)
                inputs = rounded(states[part])
                chunk_loss, gradient = _chunk_function(device)(
                    inputs, weight, bias, targets[part], scale, softcap, dtype
                )
                loss += chunk_loss
                gradient = rounded(gradient)
                if states_grad is not None:
                    states_grad[part] = _product(gradient, weight)
                if weight_grad is not None:
                    _add_product_(weight_grad, gradient.t(), inputs)
                if bias_grad is not None:
                    bias_grad += gradient.sum(0, dtype=torch.float32)
                del gradient  # before there is another one
        ctx.save_for_backward(states_grad, weight_grad, bias_grad)
        return loss

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, factor: Tensor) -> tuple[Tensor | None, ...]:
        factor = factor * ctx.scale
        states, weight, bias = (None if gradient is None else gradient.mul_(factor) for gradient in ctx.saved_tensors)
        return states, weight, bias, None, None, None, None  # autograd casts them to the dtypes of what was passed in


linear_cross_entropy: Callable[..., Tensor] = _LinearCrossEntropy.apply
"""Return the cross-entropy summed over the targets; shape (), fp32.

Factors of products are rounded to the dtype of autocast, else of the states; sums are kept in fp32, that of the
weight's gradient over all chunks too.

Args:
    states: what the layer sees, shape (targets, width).
    weight: shape (vocabulary, width).
    bias: shape (vocabulary,), or None.
    targets: shape (targets,), int64.
    scale: of the layer's outputs.
    softcap: the logits are softcap * tanh(scaled outputs / softcap); None: the scaled outputs.
    rows: for how many targets there are logits at once.
"""


@cache
def _chunk_function(device: str) -> Callable[..., tuple[Tensor, Tensor]]:
    """Return `_loss_and_gradient`; on a GPU compiled, where triton finds the C compiler that it needs."""
    compilers = os.environ.get("CC", "gcc"), "clang"
    has_compiler = find_spec("triton") and any(map(shutil.which, compilers))
    return torch.compile(_loss_and_gradient) if device == "cuda" and has_compiler else _loss_and_gradient


def _loss_and_gradient(
    states: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    scale: float,
    softcap: float | None,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:
    """Return the loss of a chunk, shape (), fp32, and its gradient in the scaled outputs, (targets, vocabulary)."""
    logits = _product(states, weight.t())  # changed in place, as there is no room for two of this size
    if bias is not None:
        logits += bias
    if scale != 1:
        logits *= scale
    if softcap is not None:
        logits.div_(softcap).tanh_()
        slope = logits.square().neg_().add_(1)
        logits *= softcap
    column = targets[:, None]
    highest, at_target = logits.amax(1, keepdim=True), logits.gather(1, column)
    gradient = logits.sub_(highest).exp_()
    total = gradient.sum(1, keepdim=True)
    loss = (total.log() + highest - at_target).sum()
    at_target = gradient.div_(total).gather(1, column) - 1
    if softcap is not None:
        gradient *= slope
        at_target *= slope.gather(1, column)
    return loss, gradient.to(dtype).scatter_(1, column, at_target.to(dtype))


def _product(a: Tensor, b: Tensor) -> Tensor:
    return a @ b if a.dtype == torch.float32 else torch.mm(a, b, out_dtype=torch.float32)


def _add_product_(total: Tensor, a: Tensor, b: Tensor) -> None:
    if a.dtype == torch.float32:
        torch.addmm(total, a, b, out=total)
    else:
        torch.addmm(total, a, b, out_dtype=torch.float32, out=total)
