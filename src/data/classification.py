"""Labelled texts for a classifier: the labels' names, the texts' tokens, batches of similar lengths."""

import inspect
import re
import sys
from typing import Any

import numpy as np
from datasets import ClassLabel, Dataset
from datasets.fingerprint import Hasher
from transformers import PreTrainedTokenizerFast

MEGA_BATCH = 50
"""Batches that are sorted by length together, as in transformers' LengthGroupedSampler."""


def label_names(parts: list[Dataset], column: str) -> list[list[str]]:
    """The labels of each part's rows as text, without white space around it; where the dataset has numbers with names
    for them, the names. A whole number is one however it is written, as pandas makes 1.0 of 1 where another row has
    none, unless there are others, such as 1.5."""
    found = []
    for rows in parts:
        feature, labels = rows.features[column], rows[column][:]
        if isinstance(feature, ClassLabel):  # a number without a name, such as -1 for unknown, stays one
            found.append([feature.names[i] if 0 <= i < len(feature.names) else str(i) for i in labels])
        else:
            found.append([str(label).strip() for label in labels])
    if all(re.fullmatch(r"-?[0-9]+(\.0+)?", name) for name in {name for names in found for name in names}):
        return [[name.partition(".")[0] for name in names] for names in found]
    return found


def in_order(labels: list[str]) -> list[str]:
    """Each label once: numbers by their size, names by the alphabet."""
    different = set(labels)
    if all(re.fullmatch("-?[0-9]+", label) for label in different):
        return sorted(different, key=int)
    return sorted(different)


def tokenised(
    rows: Dataset, labels: list[int], tokenizer: PreTrainedTokenizerFast, sequence_length: int, what: str
) -> Dataset:
    """Tokenises all columns, with a progress bar named `what`; a second time it comes from the cache.

    Returns:
        A table with the model's inputs, `label`, `length` in tokens, and whether the text was `truncated`.
    """
    texts = rows.column_names
    arguments = {"texts": texts, "tokenizer": tokenizer, "sequence_length": sequence_length}
    source = inspect.getsource(sys.modules[__name__])  # else the cache outlives a change in this file
    table = rows.map(
        _tokenise,
        batched=True,
        remove_columns=texts,
        fn_kwargs=arguments,
        new_fingerprint=Hasher.hash([rows._fingerprint, arguments, source]),
        desc=f"tokenising {what}",
    )
    return table.add_column("label", labels)


def length_grouped(lengths: np.ndarray, random: np.random.Generator, batch_size: int) -> np.ndarray:
    """An order in which each batch has texts of similar lengths, and the batches come at random.

    Args:
        lengths: shape (examples,).

    Returns:
        Indices, each once; shape (examples,), int64. The last batch may be smaller.
    """
    order = random.permutation(len(lengths))
    size = MEGA_BATCH * batch_size
    parts = [order[i : i + size] for i in range(0, len(order), size)]
    order = np.concatenate([part[np.argsort(-lengths[part], kind="stable")] for part in parts])
    whole = len(order) // batch_size * batch_size
    batches = random.permutation(order[:whole].reshape(-1, batch_size))
    return np.concatenate([batches.reshape(-1), order[whole:]])


def _tokenise(
    batch: dict[str, list[Any]], texts: list[str], tokenizer: PreTrainedTokenizerFast, sequence_length: int
) -> dict[str, list[Any]]:
    columns = [batch[name] for name in texts]
    longest = [len(ids) for ids in tokenizer(*columns, verbose=False)["input_ids"]]
    encoded = tokenizer(*columns, truncation=True, max_length=sequence_length)
    tokenizer.backend_tokenizer.no_truncation()  # a tokenizer that remembers it has another fingerprint
    return {
        **encoded,
        "length": [len(ids) for ids in encoded["input_ids"]],
        "truncated": [length > sequence_length for length in longest],
    }
