"""Pictures in tables, and a classifier's tables: its worst mistakes, its confusion matrix and its accuracy by label."""

import io
from base64 import b64encode
from collections.abc import Callable
from typing import Any

import numpy as np
from PIL import Image
from torch import Tensor

from src.tasks.base import PICTURE, Columns, Tables, Tensors

MAX_MISTAKES = 24
MAX_LABELS = 50
"""Labels in a table; if there are more, those that are most often predicted wrongly."""


def picture(image: Any) -> str:
    """Return a table cell that shows an image.

    Args:
        image: PIL's; or an array or a tensor, on any device, of shape (H, W) or (H, W, 3), uint8, or bool for a mask,
            of which True is white.

    Raises:
        ValueError: it has another shape or dtype. Of floats, or of labels, only the caller knows which value is white.
    """
    if not isinstance(image, Image.Image):
        pixels = np.asarray(image.cpu() if isinstance(image, Tensor) else image)
        if pixels.dtype not in (bool, np.uint8) or pixels.shape[2:] not in ((), (3,)):
            raise ValueError(
                f"{pixels.dtype} of shape {pixels.shape} is no picture: it needs uint8 or bool of shape (H, W) or "
                "(H, W, 3), such as (255 * image).round().to(torch.uint8)"
            )
        image = Image.fromarray(pixels)
    image.save(png := io.BytesIO(), "png")
    return PICTURE + b64encode(png.getvalue()).decode()


def label_tables(outputs: Tensors, labels: list[str], show: Callable[[int], dict[str, Any]]) -> Tables:
    """Return the tables `mistakes`, `confusion` and `classes`.

    Args:
        outputs: predictions and references, shape (examples,), int64, and probabilities, shape (examples, labels).
        labels: names of the labels.
        show: returns the first cells of an example's row in `mistakes`, given its index.
    """
    predictions, references, probabilities = (outputs[n] for n in ("predictions", "references", "probabilities"))
    wrong = (predictions != references).nonzero()[:, 0]
    confidences = probabilities[wrong, predictions[wrong]]
    order = confidences.argsort(descending=True, stable=True)[:MAX_MISTAKES]
    mistakes = [
        {**show(i), "label": labels[references[i]], "prediction": labels[predictions[i]], "confidence": c, "index": i}
        for i, c in zip(wrong[order].tolist(), confidences[order].tolist(), strict=True)
    ]
    times_wrong = predictions[wrong].bincount(minlength=len(labels))
    shown = times_wrong.argsort(descending=True, stable=True)[:MAX_LABELS].sort().values.tolist()
    confusion, classes = [], []
    for label in shown:
        counts = predictions[references == label].bincount(minlength=len(labels)).tolist()
        examples = sum(counts)
        confusion.append({"label": labels[label]} | {labels[i]: counts[i] for i in shown})
        accuracy = counts[label] / examples if examples else None
        classes.append({"label": labels[label], "examples": examples, "accuracy": accuracy})
    return {"mistakes": mistakes, "confusion": confusion, "classes": classes}


def label_columns(outputs: Tensors, labels: list[str], named: Callable[[Any], Any] | None = None) -> Columns:
    """Return the columns of a classifier's predictions. Arguments are as for `label_tables`; if labels are not indices,
    `named` returns what stands for one, and there may be no probabilities."""
    names = {"label": "references", "prediction": "predictions"}
    columns = {column: [*map(named or labels.__getitem__, outputs[name].tolist())] for column, name in names.items()}
    if "probabilities" in outputs:
        for label, probabilities in zip(labels, outputs["probabilities"].T.tolist(), strict=True):
            columns[f"probability_{label}"] = probabilities
    return columns
