"""Labelled texts for a classifier: the labels' names, the texts' tokens, batches of similar lengths."""

import re

import numpy as np
from transformers import PreTrainedTokenizerFast

from src.tasks.text.values import Rows

MEGA_BATCH = 50
"""Batches that are sorted by length together, as in transformers' LengthGroupedSampler."""


def sorted_labels(labels: list[str]) -> list[str]:
    """Return each label once, sorted: numbers by value, names alphabetically."""
    are_numbers = all(re.fullmatch("-?[0-9]+", label) for label in set(labels))
    return sorted(set(labels), key=int if are_numbers else None)


def encode_texts(batch: Rows, tokenizer: PreTrainedTokenizerFast, sequence_length: int) -> Rows:
    """Return the model's inputs for texts, or pairs of them, with `length` and `truncated`."""
    encoded = tokenizer(*batch.values(), truncation=True, max_length=sequence_length)
    tokenizer.backend_tokenizer.no_truncation()  # a tokenizer that remembers it has another fingerprint
    return {
        **encoded,
        "length": [len(ids) for ids in encoded["input_ids"]],
        "truncated": [bool(encoding.overflowing) for encoding in encoded.encodings or []],
    }


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
