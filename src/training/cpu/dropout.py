"""Dropout whose mask is cheap to draw."""

import torch
from torch import Tensor, nn


class Dropout(nn.Dropout):
    """Works as nn.Dropout, which draws a float for each unit and can take longer than the layers around it. Here a unit
    gets 8 random bits if the probability is a multiple of 1/256, else 32; torch's floats have 24.
    """

    def forward(self, x: Tensor) -> Tensor:
        """Return `x`, of any shape, fp32 or half precision, with units dropped."""
        if not self.training or self.p == 0:
            return x
        if torch.compiler.is_compiling() or self.p == 1:
            return super().forward(x)
        return x * _mask(x, self.p) * (1 / (1 - self.p))


def _mask(x: Tensor, p: float) -> Tensor:
    """Return 1 with probability 1 - p, else 0, in x's dtype and layout: a product of two layouts takes several times as
    long, and a bool would be cast once more in the backward pass.
    """
    bits, dtype, lowest = (8, torch.uint8, 0) if (p * 256).is_integer() else (32, torch.int32, -(2**31))
    units = x.numel()
    words = torch.empty(-(-units * bits // 64), dtype=torch.int64).random_(-(2**63), None)
    is_kept = words.view(dtype)[:units] >= round(p * 2**bits) + lowest
    return is_kept.as_strided(x.shape, torch.empty_like(x).stride()).to(x.dtype)
