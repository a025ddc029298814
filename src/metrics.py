"""Metrics on `evaluate`, defined here because `evaluate.load("accuracy")` fetches code from the Hub at run time.

To add one, subclass `evaluate.Metric`: `_info` names the inputs and their types, `_compute` returns the values by
name. Then call it in your task's `metrics`. It sees every example exactly once, on the main process. Import this
file inside that method: `evaluate` takes seconds to import.
"""

from typing import Any

import datasets
import evaluate
import numpy as np


class Accuracy(evaluate.Metric):
    """The share of predictions that equal their reference."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(keep_in_memory=True, **kwargs)

    def _info(self) -> evaluate.MetricInfo:
        return evaluate.MetricInfo(
            description=self.__doc__,
            citation="",
            features=datasets.Features({"predictions": datasets.Value("int64"), "references": datasets.Value("int64")}),
        )

    def _compute(self, predictions: list[int], references: list[int]) -> dict[str, float]:
        return {"accuracy": float(np.mean(np.equal(predictions, references)))}
