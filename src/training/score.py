"""Score evaluations, for early stopping, the best checkpoints and reports."""

import math
import sys
from typing import Literal

LESS_IS_BETTER = "loss", "perplexity"
"""Suffixes of the metrics for which less is better."""


def score(value: float, metric: str, mode: Literal["min", "max"] | None) -> float:
    """Return a metric's value as a number where higher is better; NaN scores worst."""
    # comparisons with NaN are false: if the first value is NaN, nothing would ever beat it. JSON has no infinity.
    if math.isnan(value):
        return -sys.float_info.max
    is_less_better = mode == "min" or (mode is None and metric.endswith(LESS_IS_BETTER))
    return -value if is_less_better else value
