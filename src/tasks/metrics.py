"""Metrics built on `evaluate`, defined here because `evaluate.load("accuracy")` fetches code from the Hub at run time.

To add one, subclass `evaluate.Metric`: `_info` names the inputs and their types, `_compute` returns the values by name.
Your task's `metrics` gets it by name from `load_metric`, as importing this file takes seconds.
"""

from typing import Any

import datasets
import evaluate
import numpy as np
from sklearn.metrics import f1_score, matthews_corrcoef

from src.tasks.base import Metrics


class _Numbers(datasets.Features):
    """Writes columns as they are: datasets would inspect each number on its own."""

    def encode_batch(self, batch: dict[str, Any]) -> dict[str, np.ndarray]:
        return {name: np.asarray(column) for name, column in batch.items()}


class _LabelMetric(evaluate.Metric):
    """Compares predicted labels with references, both int64 of shape (examples,)."""

    def _info(self) -> evaluate.MetricInfo:
        features = _Numbers({"predictions": datasets.Value("int64"), "references": datasets.Value("int64")})
        return evaluate.MetricInfo(description=self.__doc__, citation="", features=features)


class Accuracy(_LabelMetric):
    """Computes the fraction of predictions that equal their reference."""

    def _compute(self, predictions: list[int], references: list[int]) -> Metrics:
        return {"accuracy": float(np.mean(np.equal(predictions, references)))}


class F1(_LabelMetric):
    """Computes the harmonic mean of precision and recall: of label 1 if there are two `labels`, else the mean over
    them."""

    def _compute(self, predictions: list[int], references: list[int], labels: int) -> Metrics:
        average = "binary" if labels == 2 else "macro"
        return {"f1": float(f1_score(references, predictions, average=average, zero_division=0))}


class Matthews(_LabelMetric):
    """Computes Matthews' correlation coefficient, -1 to 1; 0 is chance, however imbalanced the labels."""

    def _compute(self, predictions: list[int], references: list[int]) -> Metrics:
        return {"matthews_correlation": float(matthews_corrcoef(references, predictions))}
