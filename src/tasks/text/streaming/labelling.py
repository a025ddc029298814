"""Streamed texts with labels, for a classifier."""

from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedTokenizerFast

from src.config.errors import listed
from src.tasks.text.documents import Chunker
from src.tasks.text.labels import encode_texts
from src.tasks.text.packing import Chunk, ChunkLists
from src.tasks.text.values import Rows, as_label


def known_label(value: Any, labels: list[str]) -> str:
    """Return a label as text. Raise a ValueError if it is none of these."""
    label = as_label(value)
    if label not in labels:
        raise ValueError(f"{label} is not among the evaluation data's ({listed(labels)})")
    return label


@dataclass(frozen=True)
class Labelling:
    """Makes a chunk of each row."""

    label: str
    """Column of labels."""
    labels: list[str]
    """All labels that the model knows."""
    tokenizer: PreTrainedTokenizerFast
    sequence_length: int

    @property
    def filler(self) -> Chunk:
        """Return what stands for a row that was skipped: its label is ignored by the loss."""
        return {name: [1] for name in self.tokenizer.model_input_names} | {"label": -100, "length": 0}

    def chunks_by_row(self, rows: Rows) -> ChunkLists:
        """Return the chunk of each row."""
        texts = {name: values for name, values in rows.items() if name != self.label}
        encoded = encode_texts(texts, self.tokenizer, self.sequence_length)
        encoded["label"] = [self.labels.index(label) for label in rows[self.label]]
        return [[dict(zip(encoded, values, strict=True))] for values in zip(*encoded.values(), strict=True)]


Maker = Chunker | Labelling
