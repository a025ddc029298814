"""Which of two evaluations is better, for early stopping, the best checkpoints and the reports."""

import math
import sys
from typing import Literal

LESS_IS_BETTER = ("loss", "perplexity")
"""Endings of metric names for which less is better."""


def score(value: float, metric: str, mode: Literal["min", "max"] | None) -> float:
    """Return a metric's value as a number where higher is better; NaN counts as the worst."""
    # every comparison with NaN is false: a first NaN as the best so far would never be beaten. JSON has no infinity.
    if math.isnan(value):
        return -sys.float_info.max
    if mode is None:
        mode = "min" if metric.endswith(LESS_IS_BETTER) else "max"
    return -value if mode == "min" else value
