"""Streamed texts with labels, for a classifier."""

from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedTokenizerFast

from src.tasks.text.documents import Chunker
from src.tasks.text.labels import encode_texts, label_name
from src.tasks.text.packing import Chunk
from src.tasks.text.source import ColumnKind, complaint
from src.tasks.text.streaming.shards import Rows


@dataclass(frozen=True)
class Labelling:
    """Makes a chunk of each row."""

    label: str
    """Column of labels."""
    labels: list[str]
    """All labels that the model knows."""
    names: dict[Any, str]
    """Names of labels that are numbers in the data."""
    tokenizer: PreTrainedTokenizerFast
    sequence_length: int

    @property
    def filler(self) -> Chunk:
        """Return what stands for a row that was skipped: its label is ignored by the loss."""
        return {name: [1] for name in self.tokenizer.model_input_names} | {"label": -100, "length": 0}

    def complaint(self, value: Any, kind: ColumnKind) -> str | None:
        """Return why a value cannot be used; None: it can."""
        says = complaint(value, kind)
        if says or kind != "label":
            return says
        name = label_name(value, self.names)
        return None if name in self.labels else f"{name} is not among the evaluation data's ({', '.join(self.labels)})"

    def chunks_by_row(self, rows: Rows) -> list[list[Chunk]]:
        """Return the chunk of each row."""
        texts = {name: values for name, values in rows.items() if name != self.label}
        encoded = encode_texts(texts, self.tokenizer, self.sequence_length)
        encoded["label"] = [self.labels.index(label_name(label, self.names)) for label in rows[self.label]]
        return [[dict(zip(encoded, values, strict=True))] for values in zip(*encoded.values(), strict=True)]


Maker = Chunker | Labelling
