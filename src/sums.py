"""What a step's processes tell each other besides gradients: six numbers, in one exchange."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from accelerate import Accelerator
from torch import Tensor


class Sums(NamedTuple):
    """Over the micro-batches of all processes, on the host."""

    loss: float
    counted: float
    """What the loss counts: examples, tokens."""
    tokens: float
    """Without padding; 0 where the task is not text."""
    padded_tokens: float
    """With it."""
    stop_requests: float
    """Processes that were asked to stop."""
    squares: float
    """Of the gradients."""


def reduce_step_stats(
    accelerator: Accelerator,
    amounts: Sequence[Sequence[Tensor | float]],
    gradients: list[Tensor],
    is_stopping: bool,
) -> Sums:
    """Collective. Waits for the device.

    Args:
        amounts: of each of this process's micro-batches, the loss, what it counts, tokens and tokens with padding.
        gradients: this process's; where not sharded, the same on all.
    """
    squares = sum_of_squares(gradients).item() / (1 if accelerator.is_fsdp2 else accelerator.num_processes)
    own = [*(sum(map(float, kind)) for kind in zip(*amounts, strict=True)), float(is_stopping), squares]
    if accelerator.num_processes == 1:
        return Sums(*own)
    return Sums(*accelerator.reduce(float64_tensor(own, accelerator.device), "sum").tolist())


def sum_of_squares(tensors: list[Tensor]) -> Tensor:
    """Of all their values; shape (), float64, but on MPS."""
    device = tensors[0].device
    if device.type == "cpu":  # torch's norm of a million values is off by 5e-5 there, but its sum adds in pairs
        return torch.stack([tensor.square().sum() for tensor in tensors]).double().sum()
    dtype = torch.float32 if device.type == "mps" else torch.float64
    return torch.stack(torch._foreach_norm(tensors, 2, dtype=dtype)).square().sum()


def float64_tensor(values: Sequence[float], device: torch.device) -> Tensor:
    """As a vector to sum in: float64, but for MPS, which has none."""
    return torch.tensor(values, dtype=torch.float32 if device.type == "mps" else torch.float64, device=device)
