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
from torch.nn import functional as F


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, states: Tensor, weight: Tensor, targets: Tensor, scale: float, softcap: float | None, rows: int
    ) -> Tensor:
        device = states.device.type
        dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else states.dtype

        def rounded(tensor: Tensor) -> Tensor:  # on a CPU products of half precision have sums of half precision
            return tensor.to(dtype) if device == "cuda" else tensor.to(dtype).float()

        states_grad = torch.empty_like(states)
        weight_grad = torch.zeros_like(weight, dtype=torch.float32) if ctx.needs_input_grad[1] else None
        loss = states.new_zeros((), dtype=torch.float32)
        with torch.autocast(device, enabled=False):
            weight = rounded(weight)
            exact: dict[str, Any] = {} if weight.dtype == torch.float32 else {"out_dtype": torch.float32}
            for start in range(0, len(states), rows):
                part = slice(start, start + rows)
                inputs = rounded(states[part])
                chunk_loss, gradient = _chunk_function(device)(
                    inputs, weight, targets[part], scale, softcap, dtype, exact
                )
                loss += chunk_loss
                gradient = rounded(gradient)
                states_grad[part] = torch.mm(gradient, weight, **exact)
                if weight_grad is not None:
                    torch.addmm(weight_grad, gradient.t(), inputs, out=weight_grad, **exact)
                del gradient  # before there is another one
        ctx.scale = scale
        ctx.save_for_backward(states_grad, weight_grad)
        return loss

    @staticmethod
    def backward(ctx: Any, factor: Tensor) -> tuple[Tensor | None, ...]:
        factor = factor * ctx.scale
        states, weight = (None if gradient is None else gradient.mul_(factor) for gradient in ctx.saved_tensors)
        return states, weight, None, None, None, None  # autograd casts them to the dtypes of what was passed in


linear_cross_entropy: Callable[..., Tensor] = _LinearCrossEntropy.apply
"""Return the cross-entropy summed over the targets; shape (), fp32.

Factors of products are rounded to the dtype of autocast, else of the states; sums are kept in fp32, that of the
weight's gradient over all chunks too.

Args:
    states: what the layer sees, shape (targets, width).
    weight: shape (vocabulary, width).
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
    targets: Tensor,
    scale: float,
    softcap: float | None,
    dtype: torch.dtype,
    exact: dict[str, Any],
) -> tuple[Tensor, Tensor]:
    """Return the loss of a chunk, shape (), fp32, and its gradient in the scaled outputs, (targets, vocabulary)."""
    logits = torch.mm(states, weight.t(), **exact)  # changed in place, as there is no room for many of this size
    if scale != 1:
        logits *= scale
    if softcap is not None:
        logits.div_(softcap).tanh_().mul_(softcap)
    log_probabilities = logits.log_softmax(1)
    slope = None if softcap is None else logits.div_(softcap).square_().neg_().add_(1)
    del logits
    loss = F.nll_loss(log_probabilities, targets, reduction="sum")
    gradient = log_probabilities.exp_()
    gradient[torch.arange(len(targets), device=targets.device), targets] -= 1
    if slope is not None:
        gradient *= slope
    return loss, gradient.to(dtype)
