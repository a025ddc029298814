"""How far apart two sets of gradients may be: rounding in fp32, and in half precision what that does to one model."""

import math
from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

EXACT = 1e-4
"""Largest relative error in fp32. The order of a sum makes 1e-7 to 1e-5; a fault of distribution 1e-2 to 1."""
REORDERED = 1e-3
"""The same where the forward pass rounds otherwise too, in a batch of another size or compiled: a ReLU that flips, or
another maximum in a pool, is worth 1e-4."""
COMPRESSED = 2.0**-7
"""The same where DDP rounds gradients to half precision on their way to the other processes."""
NOISE_FACTORS = {"same": 2.0, "other": 4.0, "FSDP": 16.0}
"""In half precision an error may be so many times that of one unwrapped model, between autocast to bf16 and fp32: where
the run is held against that model under the same autocast; where under another, or in other micro-batches; under FSDP,
which computes all in half precision, where autocast does only what bears it well."""
MOST = 0.5
"""In half precision too: a sum that was not divided by two processes is 1 off."""
FLOOR = 1e-2
"""Times the root mean square of all gradients: to what lies below, the rounding of larger ones leaks over."""


def norm(tensors: Iterable[Tensor]) -> float:
    """L2, over all of them."""
    on_cpu = (tensor.cpu() if tensor.device.type == "mps" else tensor for tensor in tensors)  # it has no float64
    return math.hypot(*(float(torch.linalg.vector_norm(tensor, dtype=torch.float64)) for tensor in on_cpu))


def off(found: float, expected: float) -> float:
    """The relative error; the absolute one where 0 was expected."""
    return abs(found - expected) / (abs(expected) or 1.0)


def relative_errors(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> dict[str, float]:
    """By name, the L2 norm of the difference as a share of that of what was expected; a tensor that is not in `found`
    counts as zeros. `all` is that of all tensors together."""
    norms = {name: norm([tensor]) for name, tensor in expected.items()}
    differences = {name: norm([tensor - found[name] if name in found else tensor]) for name, tensor in expected.items()}
    total = math.hypot(*norms.values()) + 1e-30
    floor = FLOOR * total / math.sqrt(max(1, sum(tensor.numel() for tensor in expected.values())))
    return {
        **{n: d / (norms[n] + floor * math.sqrt(expected[n].numel())) for n, d in differences.items()},
        "all": math.hypot(*differences.values()) / total,
    }


class Worst:
    """The error that comes closest to its bound, or goes furthest beyond it."""

    def __init__(self, bound: float = EXACT) -> None:
        self.ratio, self.error, self.name = 0.0, 0.0, ""
        self.bound = self._least = bound

    def add(self, errors: Mapping[str, float], noise: Mapping[str, float] | None = None, factor: float = 1.0) -> None:
        """Args:
        errors: by name.
        noise: what half precision makes of each, and of `all`; empty or None in fp32.
        factor: how many times the noise the errors may be.
        """
        for name, error in errors.items():
            allowed = min(MOST, factor * max(noise.get(name, 0), noise["all"])) if noise else 0.0
            bound = max(self._least, allowed)
            ratio = error / bound if math.isfinite(error) else math.inf
            if ratio > self.ratio:
                self.ratio, self.error, self.name, self.bound = ratio, error, name, bound

    @property
    def is_within(self) -> bool:
        return self.ratio <= 1

    @property
    def says(self) -> str:
        return (f"{self.error:.1e}" if self.error else "0") + (f" ({self.name})" if self.name else "")

    @property
    def says_bound(self) -> str:
        return f"{self.bound:.2g}" + (", by what bf16 does to one model" if self.bound > self._least else "")


def verdict(everywhere: list[Worst]) -> tuple[str, str, bool]:
    """Of all processes' errors, for a finding: the worst, its bound, and whether it is within."""
    rank = max(range(len(everywhere)), key=lambda rank: everywhere[rank].ratio)
    worst = everywhere[rank]
    is_alone = not worst.is_within and any(other.is_within for other in everywhere)
    return worst.says + (f", on process {rank}" if is_alone else ""), worst.says_bound, worst.is_within
