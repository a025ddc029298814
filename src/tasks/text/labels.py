"""Labelled texts for a classifier: the labels' names, the texts' tokens, batches of similar lengths."""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerFast

from src.config.errors import listed
from src.tasks.text.packing import Chunk, ChunkLists
from src.tasks.text.values import Rows, as_label

MEGA_BATCH = 50
"""Batches that are sorted by length together, as in transformers' LengthGroupedSampler."""


def sorted_labels(labels: Iterable[str]) -> list[str]:
    """Return each label once, sorted: numbers by value, names alphabetically."""
    names = set(labels)
    are_numbers = all(re.fullmatch("-?[0-9]+", name) for name in names)
    return sorted(names, key=int if are_numbers else None)


def known_label(value: Any, labels: list[str]) -> str:  # room: streaming
    """Return a label as text. Raise a ValueError if it is none of these."""
    label = as_label(value)
    if label not in labels:
        raise ValueError(f"{label} is not among the evaluation data's ({listed(labels)})")
    return label


@dataclass(frozen=True)
class Labelling:
    """Makes the model's inputs from rows of a text, or a pair of them, and a label."""

    label: str
    """Column of labels."""
    labels: list[str]
    """All labels that the model knows."""
    tokenizer: PreTrainedTokenizerFast
    sequence_length: int

    def __call__(self, rows: Rows) -> Rows:
        """Return the model's inputs, with `label`, a number, `length` in tokens, and whether the text was
        `truncated`."""
        texts = [values for name, values in rows.items() if name != self.label]
        encoded = self.tokenizer(*texts, truncation=True, max_length=self.sequence_length)
        self.tokenizer.backend_tokenizer.no_truncation()  # a tokenizer that remembers it has another fingerprint
        return {
            **encoded,
            "label": [self.labels.index(label) for label in rows[self.label]],
            "length": [len(ids) for ids in encoded["input_ids"]],
            "truncated": [bool(encoding.overflowing) for encoding in encoded.encodings or []],
        }

    @property
    def filler(self) -> Chunk:  # room: streaming
        """Return what stands for a row that was skipped: its label is ignored by the loss."""
        return {name: [1] for name in self.tokenizer.model_input_names} | {"label": -100, "length": 0}

    def chunks_by_row(self, rows: Rows) -> ChunkLists:  # room: streaming
        """Return the chunk of each row."""
        made = self(rows)
        return [[dict(zip(made, values, strict=True))] for values in zip(*made.values(), strict=True)]


def length_grouped(lengths: np.ndarray, random: np.random.Generator, batch_size: int) -> np.ndarray:
    """Return indices, each once, in an order in which a batch has texts of similar lengths and the batches are
    shuffled; `lengths` and indices have shape (examples,), int64. The last batch may be smaller."""
    order = random.permutation(len(lengths))
    size = MEGA_BATCH * batch_size
    parts = np.split(order, range(size, len(order), size))
    order = np.concatenate([part[np.argsort(-lengths[part], kind="stable")] for part in parts])
    whole = len(order) // batch_size * batch_size
    batches = random.permutation(order[:whole].reshape(-1, batch_size))
    return np.concatenate([batches.reshape(-1), order[whole:]])
