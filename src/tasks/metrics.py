"""Metrics built on `evaluate`, defined here because `evaluate.load("accuracy")` fetches code from the Hub at run time.

To add one, subclass `evaluate.Metric`: `_info` names the inputs and their types, `_compute` returns the values by name.
Your task's `metrics` gets it by name from `load_metric`, as importing this file takes seconds.
"""

from functools import partial
from typing import Any

import datasets
import evaluate
import numpy as np
from sklearn.metrics import accuracy_score, f1_score, matthews_corrcoef

from src.tasks.base import Metrics


class _Numbers(datasets.Features):
    """Writes columns as they are: datasets would inspect each number on its own."""

    def encode_batch(self, batch: dict[str, Any]) -> dict[str, np.ndarray]:
        return {name: np.asarray(column) for name, column in batch.items()}


class _LabelMetric(evaluate.Metric):
    """Compares predicted labels with references, both int64 of shape (examples,)."""

    kind: Any = datasets.Value("int64")

    def _info(self) -> evaluate.MetricInfo:
        features = _Numbers({"predictions": self.kind, "references": self.kind})
        return evaluate.MetricInfo(description=self.__doc__, citation="", features=features)


class Accuracy(_LabelMetric):
    """Computes the fraction of predictions that equal their reference; and F1, the harmonic mean of precision and
    recall, for each of sklearn's averages that is asked for, as in `f1="macro"`."""

    def _compute(self, predictions: Any, references: Any, **averages: str) -> Metrics:
        f1 = partial(f1_score, references, predictions, zero_division=0)
        return {
            "accuracy": float(accuracy_score(references, predictions)),
            **{name: float(f1(average=average)) for name, average in averages.items()},
        }


class SetAccuracy(Accuracy):
    """Computes the same for sets of labels: 0 or 1 for each label, int64, of shape (examples, labels)."""

    kind = datasets.List(_LabelMetric.kind)


class Matthews(_LabelMetric):
    """Computes Matthews' correlation coefficient, -1 to 1; 0 is chance, however imbalanced the labels."""

    def _compute(self, predictions: list[int], references: list[int]) -> Metrics:
        return {"matthews_correlation": float(matthews_corrcoef(references, predictions))}
