"""How far apart two sets of gradients may be: rounding in fp32, and in half precision what that does to one model."""

import math
from collections.abc import Iterable, Mapping

from torch import Tensor

EXACT = 1e-4
"""Largest relative error in fp32. The order of a sum makes 1e-7 to 1e-5; a fault of distribution 1e-2 to 1."""
NOISE_FACTOR = 4.0
"""In half precision an error may be so many times that of one unwrapped model, between autocast to bf16 and fp32."""
FLOOR = 1e-2
"""Times the root mean square of all gradients: to what lies below, the rounding of larger ones leaks over."""


def norm(tensors: Iterable[Tensor]) -> float:
    """L2, over all of them."""
    return math.sqrt(sum(float(tensor.double().square().sum()) for tensor in tensors))


def relative_errors(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> dict[str, float]:
    """By name, the L2 norm of the difference as a share of that of what was expected; a tensor that is not in `found`
    counts as zeros. `all` is that of all tensors together."""
    size = math.sqrt(sum(tensor.numel() for tensor in expected.values()))
    floor = FLOOR * norm(expected.values()) / size
    differences = {name: tensor - found[name] if name in found else tensor for name, tensor in expected.items()}
    errors = {
        name: norm([difference]) / (norm([expected[name]]) + floor * math.sqrt(difference.numel()) + 1e-30)
        for name, difference in differences.items()
    }
    return errors | {"all": norm(differences.values()) / (norm(expected.values()) + 1e-30)}


class Worst:
    """The error that comes closest to its bound, or goes furthest beyond it."""

    def __init__(self, bound: float = EXACT) -> None:
        self.ratio, self.error, self.name = 0.0, 0.0, ""
        self.bound = self._least = bound

    def add(self, errors: Mapping[str, float], noise: Mapping[str, float] | None = None) -> None:
        """Args:
        errors: by name.
        noise: of half precision, by name, and of all together; empty or None in fp32.
        """
        for name, error in errors.items():
            bound = max(self._least, NOISE_FACTOR * max(noise[name], noise["all"])) if noise else self._least
            ratio = error / bound if math.isfinite(error) else math.inf
            if ratio >= self.ratio:
                self.ratio, self.error, self.name, self.bound = ratio, error, name, bound

    @property
    def is_within(self) -> bool:
        return self.ratio <= 1

    @property
    def says(self) -> str:
        return f"{self.error:.1e} ({self.name})"

    @property
    def says_bound(self) -> str:
        return f"{self.bound:.2g}" + (
            f", {NOISE_FACTOR:g}x what bf16 does to one model" if self.bound > self._least else ""
        )
