"""The cross-entropy of a linear layer's outputs, a few rows of them at a time; its gradients come with it.

So the logits are computed once, and never are there all at once. torch's F.linear_cross_entropy does the same, but in
half precision it rounds the loss, and sums the weight's gradient over the chunks in that precision.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, states: Tensor, weight: Tensor, targets: Tensor, finished: Callable[[Tensor], Tensor], rows: int
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
                outputs = torch.mm(inputs, weight.t(), **exact).requires_grad_()
                with torch.enable_grad():
                    chunk_loss = F.cross_entropy(finished(outputs), targets[part], reduction="sum")
                loss += chunk_loss.detach()
                gradient = rounded(torch.autograd.grad(chunk_loss, outputs)[0])
                states_grad[part] = torch.mm(gradient, weight, **exact)
                if weight_grad is not None:
                    torch.addmm(weight_grad, gradient.t(), inputs, out=weight_grad, **exact)
                del outputs, chunk_loss, gradient  # before there are others
        ctx.save_for_backward(states_grad, weight_grad)
        return loss

    @staticmethod
    def backward(ctx: Any, factor: Tensor) -> tuple[Tensor | None, ...]:
        states, weight = (None if gradient is None else gradient.mul_(factor) for gradient in ctx.saved_tensors)
        return states, weight, None, None, None  # autograd casts them to the dtypes of what was passed in


linear_cross_entropy: Callable[..., Tensor] = _LinearCrossEntropy.apply
"""Return the cross-entropy summed over the targets; shape (), fp32.

Factors of products are rounded to the dtype of autocast, else of the states; sums are kept in fp32, that of the
weight's gradient over all chunks too.

Args:
    states: what the layer sees, shape (targets, width).
    weight: shape (vocabulary, width).
    targets: shape (targets,), int64.
    finished: makes the logits of the layer's outputs, fp32.
    rows: for how many targets there are logits at once.
"""
