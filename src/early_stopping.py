"""Which evaluation is better, and when to stop as none has been for a while."""

import math
import sys
from collections.abc import Mapping
from typing import Literal

from src.config import Config
from src.progress import Progress
from src.settings import nearest

LESS_IS_BETTER = ("loss", "perplexity", "bits_per_byte")


def score(results: Mapping[str, float], metric: str, mode: Literal["min", "max"] | None) -> float:
    """`metric` as a number of which more is better; NaN counts as the worst.

    Args:
        results: of an evaluation, by name.
    """
    value = results[metric]
    if math.isnan(value):
        return -sys.float_info.max
    return -value if mode == "min" or (mode is None and metric.endswith(LESS_IS_BETTER)) else value


def unknown_metric(results: Mapping[str, float], config: Config) -> str | None:
    """For the user, which metric the settings judge by and the evaluation lacks; None where it has all. A task that
    names its metrics is asked before it is trained."""
    judged = {"early_stopping": config.early_stopping.metric}
    if config.checkpoint.wants_best:
        judged["checkpoint"] = config.checkpoint.metric
    for setting, metric in judged.items():
        if metric is not None and metric not in results:
            near = nearest(metric, list(results))
            return f"{setting}.metric={metric}: the evaluation has no such metric{near} ({', '.join(results)})"
    return None


def count_evaluation(progress: Progress, config: Config) -> None:
    """Counts the evaluation that was just made, with or without a gain, where early stopping watches."""
    settings = config.early_stopping
    if settings.metric is None or settings.metric not in progress.evaluation:
        return
    now = score(progress.evaluation, settings.metric, settings.mode)
    if progress.best is None or now > progress.best + settings.min_delta:
        progress.best = now
        progress.evaluations_without_gain = 0
    else:
        progress.evaluations_without_gain += 1


def is_out_of_patience(progress: Progress, config: Config) -> bool:
    """Whether to end the run: the same on all processes, and after a resume."""
    return (
        config.early_stopping.metric is not None and progress.evaluations_without_gain >= config.early_stopping.patience
    )
