"""Faster training on a CPU. Nothing here is used on a GPU but `trimmed`, and without it a CPU is merely slower.

Convolutions are channels last. Dropout draws its masks cheaply. The process keeps freed memory, which is faster, or
gives it back, so that a sharded model needs no more than its shard.
"""

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

# parameters of mallopt, from glibc's malloc.h
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD, M_MMAP_MAX = -1, -3, -4

# large blocks come from the heap (no mmap), which is trimmed only if 2 GiB at its end are free
KEEP = {M_MMAP_MAX: 0, M_TRIM_THRESHOLD: 2**31 - 1}
"""Keep glibc from giving large blocks back to the kernel. Otherwise each activation is made of new pages, which the
kernel has to zero. PyTorch's allocator also keeps memory on GPUs."""
# setting them fixes them, while glibc's own threshold grows with the freed blocks, up to 32 MiB
GIVE_BACK = {M_MMAP_THRESHOLD: 8 * 2**20, M_TRIM_THRESHOLD: 32 * 2**20}
"""Make glibc give each block of 8 MiB or more back to the kernel when it is freed. Otherwise blocks that FSDP gathers
and frees would be scattered over the heap, which would grow to several times the size of the model. (From 1 MiB on, a
small Llama's step would take twice as long.) Keep up to 32 MiB at the heap's end for smaller blocks."""


@contextmanager
def trimmed(_phase: str, run: Any) -> Iterator[None]:
    """Before each phase of a run under FSDP, give the free pages between the heap's blocks back to the kernel, as glibc
    never does unasked. A Llama of 284M on 4 processes leaves 0.15 to 0.25 GB of them; it takes 30 ms."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim and run and run.accelerator.is_fsdp2:
        trim(0)
    yield


def tune_for_cpu(model: nn.Module, is_sharded: bool = False) -> list[str]:
    """Speed up this process and `model`, in place: its layers change their class but keep their names. Save memory
    rather than time if FSDP will shard it (`is_sharded`). Return what was done, for the start-up summary."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)  # other C libraries have none
    # Keeping freed memory saves 6,000 page faults per step of the MNIST CNN, a quarter to a third of its time.
    # Under FSDP, gathered weights would pile up.
    settings = GIVE_BACK if is_sharded else KEEP
    is_set = mallopt and all(mallopt(*setting) for setting in settings.items())
    # Replace the layers' class, as fully_shard does, not the layers, so that hooks stay. Leave subclasses alone, as
    # their forward may differ.
    for layer in model.modules():
        layer.__class__ = FASTER.get(type(layer), type(layer))
    return [f"glibc {'returns' if is_sharded else 'keeps'} freed memory"] if is_set else []


class Conv2d(nn.Conv2d):
    """Convolve as nn.Conv2d does, but channels last: what follows then works on vectors of channels.

    oneDNN takes 0.8 to 0.9 times as long, and torch's max pooling a twentieth. Together, fp32: an evaluation of the
    MNIST CNN takes half as long, a training step 0.83 times.
    """

    def forward(self, input: Tensor) -> Tensor:
        """Return the convolution of `input`, of shape (batch, channels, height, width) or without a batch."""
        return super().forward(input.to(memory_format=torch.channels_last) if input.ndim == 4 else input)


class Dropout(nn.Dropout):
    """Drop units as nn.Dropout does, with the same distribution but other masks.

    torch draws a float per unit, on one thread: 5 to 14 ms for 590,000 units, which can be longer than the layers
    around it take. Here each unit gets 8 random bits if the probability is a multiple of 1/256 (0.4 ms), else 32 (1.0
    ms).
    """

    def forward(self, x: Tensor) -> Tensor:
        """Return `x`, of any shape, fp32 or half precision, with units dropped."""
        if not self.training or self.p == 0:
            return x
        # compiled code draws inside its fused kernels; p = 1 would divide by zero
        if torch.compiler.is_compiling() or self.p == 1:
            return super().forward(x)
        return x * _mask(x, self.p) * (1 / (1 - self.p))


class Linear(nn.Linear):
    """Multiply as nn.Linear does, but in fp32 through oneDNN, as a 1 x 1 convolution. For a plain product torch calls
    MKL, which on AMD leaves half of each AVX-512 unit idle.

    On a core of a Zen 5, with the backward pass: 210 to 240 GFLOP/s instead of 100. On a Zen 4, whose units are half as
    wide, MKL is as fast.
    """

    def forward(self, input: Tensor) -> Tensor:
        """Return the product, shape (..., out_features), of `input`, shape (..., in_features)."""
        is_small = input.numel() * self.out_features < MIN_MULTIPLICATIONS
        is_unit = type(self) is not Linear  # sharded by itself: FSDP's hooks are lost on the view returned below
        if is_small or is_unit or torch.is_autocast_enabled("cpu") or torch.compiler.is_compiling():
            return super().forward(input)
        # a row of pixels, channels last; dilation changes nothing but makes torch choose oneDNN on one thread too
        pixels = input.reshape(1, -1, 1, self.in_features).permute(0, 3, 1, 2)
        products = F.conv2d(pixels, self.weight[:, :, None, None], self.bias, dilation=2)
        return products.permute(0, 2, 3, 1).reshape(*input.shape[:-1], self.out_features)


MIN_MULTIPLICATIONS = 2**22
"""With fewer in a layer, the time that Python adds exceeds the gain."""
FASTER: dict[type[nn.Module], type[nn.Module]] = {nn.Conv2d: Conv2d, nn.Dropout: Dropout}
# among AMD's, Zen 5 is the first with this
if (found := torch.cpu.get_capabilities()).get("avx512_vp2intersect") and "AMD" in found["cpu_name"]:
    FASTER[nn.Linear] = Linear


def _mask(x: Tensor, p: float) -> Tensor:
    """Return 1 with probability 1 - p, else 0, in x's shape, dtype and layout."""
    # torch cannot compare uint32, so use int32, which begins at -2**31
    bits, dtype, lowest = (8, torch.uint8, 0) if (p * 256).is_integer() else (32, torch.int32, -(2**31))
    units = x.numel()
    # each draw has 64 bits, shared by several units; None: up to the largest int64
    words = torch.empty(-(-units * bits // 64), dtype=torch.int64).random_(-(2**63), None)
    is_kept = words.view(dtype)[:units] >= round(p * 2**bits) + lowest
    # A product of two different layouts takes several times as long. A bool would be cast in the forward pass and again
    # in the backward pass.
    return is_kept.as_strided(x.shape, torch.empty_like(x).stride()).to(x.dtype)
