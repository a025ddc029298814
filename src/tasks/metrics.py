"""Metrics on `evaluate`, defined here because `evaluate.load("accuracy")` fetches code from the Hub at run time.

To add one, subclass `evaluate.Metric`: `_info` names the inputs and their types, `_compute` returns the values by
name. Then call it in your task's `metrics`. It sees every example exactly once, on the main process. Import this
file inside that method: `evaluate` takes a second to import.
"""

import sys
from typing import Any

import datasets
import numpy as np

_transformers = sys.modules.get("transformers")
sys.modules["transformers"] = None  # type: ignore[assignment]  # evaluate would import all pipelines (docs/upstream.md)
try:
    import evaluate
finally:
    del sys.modules["transformers"]
    if _transformers:
        sys.modules["transformers"] = _transformers


class _Numbers(datasets.Features):
    """Columns of numbers, written as they are: datasets looks at each number by itself, which takes longer than to
    evaluate a small model (docs/upstream.md)."""

    def encode_batch(self, batch: dict[str, Any]) -> dict[str, np.ndarray]:
        return {name: np.asarray(column) for name, column in batch.items()}


class _OfLabels(evaluate.Metric):
    """Compares predicted labels with references, both int64 of shape (examples,)."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(keep_in_memory=True, **kwargs)

    def _info(self) -> evaluate.MetricInfo:
        return evaluate.MetricInfo(
            description=self.__doc__,
            citation="",
            features=_Numbers({"predictions": datasets.Value("int64"), "references": datasets.Value("int64")}),
        )


class Accuracy(_OfLabels):
    """The share of predictions that equal their reference."""

    def _compute(self, predictions: list[int], references: list[int]) -> dict[str, float]:
        return {"accuracy": float(np.mean(np.equal(predictions, references)))}


class F1(_OfLabels):
    """The harmonic mean of precision and recall: of label 1 where there are two, else the mean over the labels.

    `compute` takes one thing more: `labels`, how many there are.
    """

    def _compute(self, predictions: list[int], references: list[int], labels: int) -> dict[str, float]:
        from sklearn.metrics import f1_score

        average = "binary" if labels == 2 else "macro"
        return {"f1": float(f1_score(references, predictions, average=average, zero_division=0))}


class Matthews(_OfLabels):
    """Matthews' correlation coefficient, -1 to 1; 0 is chance, however uneven the labels."""

    def _compute(self, predictions: list[int], references: list[int]) -> dict[str, float]:
        from sklearn.metrics import matthews_corrcoef

        return {"matthews_correlation": float(matthews_corrcoef(references, predictions))}
