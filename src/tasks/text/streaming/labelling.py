"""Streamed texts with labels, for a classifier."""

from typing import Any

from src.config.errors import listed
from src.tasks.text.documents import Chunker
from src.tasks.text.labels import Labelling
from src.tasks.text.values import as_label


def known_label(value: Any, labels: list[str]) -> str:
    """Return a label as text. Raise a ValueError if it is none of these."""
    label = as_label(value)
    if label not in labels:
        raise ValueError(f"{label} is not among the evaluation data's ({listed(labels)})")
    return label


Maker = Chunker | Labelling
