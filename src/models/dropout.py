"""Dropout whose mask is cheap to draw on a CPU."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class Dropout(nn.Module):
    """As nn.Dropout. On a CPU, that draws a float for each unit, which can take longer than the layers around it; here
    a unit gets 8 random bits where the probability is a multiple of 1/256, and else 32: torch's floats have 24.
    """

    def __init__(self, p: float) -> None:
        """Args:
        p: probability that a unit is dropped, below 1.
        """
        super().__init__()
        self.p = p

    def forward(self, x: Tensor) -> Tensor:
        """Any shape, fp32 or half precision."""
        if not self.training or self.p == 0:
            return x
        if x.device.type != "cpu" or torch.compiler.is_compiling():
            return F.dropout(x, self.p)
        return x * _keep(x, self.p) * (1 / (1 - self.p))


def _keep(x: Tensor, p: float) -> Tensor:
    """1 with probability 1 - p, else 0. In x's type and layout: a product of two layouts takes several times as long,
    and a bool would be cast once more in the backward pass.
    """
    bits, dtype, lowest = (8, torch.uint8, 0) if (p * 256).is_integer() else (32, torch.int32, -(2**31))
    units = x.numel()
    words = torch.empty(-(-units * bits // 64), dtype=torch.int64).random_(-(2**63), None)
    is_kept = words.view(dtype)[:units] >= round(p * 2**bits) + lowest
    return is_kept.as_strided(x.shape, torch.empty_like(x).stride()).to(x.dtype)
