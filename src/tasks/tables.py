"""Tables of a classifier's evaluation: its worst mistakes, its confusion matrix and its accuracy by label."""

from collections.abc import Callable
from typing import Any

from src.tasks.base import Tables, Tensors

MOST_MISTAKES = 24
MOST_LABELS = 50
"""Labels in a table; if there are more, those that are most often predicted wrongly."""


def label_tables(outputs: Tensors, labels: list[str], show: Callable[[int], dict[str, Any]]) -> Tables:
    """Return the tables `mistakes` (left out if there are none), `confusion` and `classes`.

    Args:
        outputs: predictions and references, shape (examples,), int64, and probabilities, shape (examples, labels).
        labels: names of the labels.
        show: returns the first cells of an example's row in `mistakes`, given its index.
    """
    predictions, references, probabilities = (outputs[n] for n in ("predictions", "references", "probabilities"))
    wrong = (predictions != references).nonzero()[:, 0]
    confidences = probabilities[wrong, predictions[wrong]]
    order = confidences.argsort(descending=True, stable=True)[:MOST_MISTAKES]
    mistakes = [
        {**show(i), "label": labels[references[i]], "prediction": labels[predictions[i]], "confidence": c, "index": i}
        for i, c in zip(wrong[order].tolist(), confidences[order].tolist(), strict=True)
    ]
    times_wrong = predictions[wrong].bincount(minlength=len(labels))
    shown = times_wrong.argsort(descending=True, stable=True)[:MOST_LABELS].sort().values.tolist()
    confusion, classes = [], []
    for label in shown:
        counts = predictions[references == label].bincount(minlength=len(labels)).tolist()
        examples = sum(counts)
        confusion.append({"label": labels[label]} | {labels[i]: counts[i] for i in shown})
        accuracy = counts[label] / examples if examples else None
        classes.append({"label": labels[label], "examples": examples, "accuracy": accuracy})
    return ({"mistakes": mistakes} if mistakes else {}) | {"confusion": confusion, "classes": classes}


def label_columns(outputs: Tensors, labels: list[str]) -> dict[str, list[Any]]:
    """Return the columns of a classifier's predictions. Arguments are as for `label_tables`."""
    names = {"label": "references", "prediction": "predictions"}
    columns = {column: [labels[i] for i in outputs[name].tolist()] for column, name in names.items()}
    for label, probabilities in zip(labels, outputs["probabilities"].T.tolist(), strict=True):
        columns[f"probability_{label}"] = probabilities
    return columns
