"""What only training on a CPU gains from: on a GPU nothing here is used, and without it a CPU is merely slower.

Dropout's mask is cheap to draw. Memory that was freed is kept by the process, which is faster, or given back, so that a
sharded model needs no more than its share.
"""

import ctypes
import sys

import torch
from torch import Tensor, nn

# parameters of mallopt, from glibc's malloc.h
M_TRIM_THRESHOLD, M_TOP_PAD, M_MMAP_THRESHOLD, M_MMAP_MAX = -1, -2, -3, -4

# large blocks come from the heap (no mmap), which grows by 64 MiB, and whose end is cut off only where 2 GiB are free
KEEP = {M_MMAP_MAX: 0, M_TRIM_THRESHOLD: 2**31 - 1, M_TOP_PAD: 64 * 2**20}
"""Keeps glibc from giving large blocks back to the kernel: otherwise each activation is made of new pages, which the
kernel zeroes first. PyTorch's allocator keeps memory on GPUs too."""
# from 1 MiB on; once set, the threshold stays: glibc's own grows with the blocks that are freed, up to 32 MiB
GIVE_BACK = {M_MMAP_THRESHOLD: 2**20}
"""Has glibc give each large block back to the kernel when it is freed. What FSDP gathers and frees, block by block,
would otherwise be scattered over the heap, which grows until it could hold the whole model several times."""


def tune_for_cpu(model: nn.Module, is_sharded: bool = False) -> list[str]:
    """Speed up this process and `model`, in place: its layers change their class, but keep their names. Return what was
    done, for the start-up summary. `is_sharded`: whether FSDP shards it, as memory is then worth more than time."""
    done = []
    # Keeping freed memory spares a step of the MNIST CNN 6,000 page faults, a quarter to a third of its time
    # (docs/figures.md). Under FSDP, what was gathered would pile up.
    if mallopt(GIVE_BACK if is_sharded else KEEP):
        done.append(f"freed memory is {'given back' if is_sharded else 'kept'}")
    # Their class is replaced, as fully_shard does it, not the layers: hooks stay. Subclasses are left alone, as their
    # forward may differ.
    for layer in model.modules():
        if type(layer) is nn.Dropout:
            layer.__class__ = Dropout
    return done


class Dropout(nn.Dropout):
    """Drop units as nn.Dropout does: with the same distribution, but other masks.

    torch draws a float for each unit, on one thread: 5 to 14 ms for 590,000 units, which can be longer than the layers
    around it take. Here a unit gets 8 random bits if the probability is a multiple of 1/256 (0.4 ms), else 32 (1.0 ms).
    """

    def forward(self, x: Tensor) -> Tensor:
        """Return `x`, of any shape, fp32 or half precision, with units dropped."""
        if not self.training or self.p == 0:
            return x
        # compiled code draws within its fused kernels; for p = 1, 1 / (1 - p) would divide by 0
        if torch.compiler.is_compiling() or self.p == 1:
            return super().forward(x)
        return x * _mask(x, self.p) * (1 / (1 - self.p))


def _mask(x: Tensor, p: float) -> Tensor:
    """Return 1 with probability 1 - p, else 0, in x's shape, dtype and layout."""
    # torch has no comparison for uint32: int32 begins at -2**31
    bits, dtype, lowest = (8, torch.uint8, 0) if (p * 256).is_integer() else (32, torch.int32, -(2**31))
    units = x.numel()
    # 64 bits a draw, which several units share; None: up to the largest int64
    words = torch.empty(-(-units * bits // 64), dtype=torch.int64).random_(-(2**63), None)
    is_kept = words.view(dtype)[:units] >= round(p * 2**bits) + lowest
    # A product of two layouts, such as channels-last and not, takes several times as long. A bool would be cast in the
    # forward and once more in the backward pass.
    return is_kept.as_strided(x.shape, torch.empty_like(x).stride()).to(x.dtype)


def mallopt(settings: dict[int, int]) -> bool:
    """Set these parameters. Return whether they could be: only glibc has them."""
    call = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    return call is not None and all(call(*setting) for setting in settings.items())
