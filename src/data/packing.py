"""Several chunks of text in one sequence: less padding, and nothing dropped."""

from bisect import bisect_left, insort
from dataclasses import dataclass
from typing import Any

import numpy as np
from datasets import Dataset


@dataclass(frozen=True)
class Sequences:
    """Sequences of one or more chunks: a map-style dataset that is asked for whole batches.

    An example is a list of chunks, each `input_ids` and `labels` of shape (length,), int32, and `bytes`, an int.
    """

    chunks: Dataset
    """A table of chunks: see src/data/documents.py."""
    rows: np.ndarray
    """The chunks' rows in the table, sequence by sequence; shape (chunks,), int64."""
    starts: np.ndarray
    """Where in `rows` each sequence begins, and where the last ends; shape (sequences + 1,), int64."""

    def __len__(self) -> int:
        return len(self.starts) - 1

    def __getitems__(self, indices: list[int]) -> list[list[dict[str, Any]]]:
        groups = [self.rows[self.starts[i] : self.starts[i + 1]] for i in indices]
        columns = self.chunks[np.concatenate(groups)]
        names = ("input_ids", "labels", "bytes")
        chunks = (dict(zip(names, values, strict=True)) for values in zip(*(columns[n] for n in names), strict=True))
        return [[next(chunks) for _ in group] for group in groups]

    def describe(self, sequence_length: int) -> dict[str, float]:
        """Return counts; `padding` is the share of the tokens where each sequence is padded to `sequence_length`."""
        columns = self.chunks.with_format("numpy").select_columns(["length", "targets", "truncated"])[:]
        tokens = int(columns["length"].sum(dtype=np.int64))
        return {
            "sequences": len(self),
            "tokens": tokens,
            "targets": int(columns["targets"].sum(dtype=np.int64)),
            "padding": 1 - tokens / (len(self) * sequence_length),
            "truncated": int(columns["truncated"].sum()),
            "without_targets": int((columns["targets"] == 0).sum()),
        }


def unpacked(chunks: Dataset) -> Sequences:
    """Return a sequence for each chunk."""
    return Sequences(chunks.with_format("numpy"), np.arange(len(chunks)), np.arange(len(chunks) + 1))


def pack(chunks: Dataset, sequence_length: int) -> Sequences:
    """Return sequences of up to `sequence_length` tokens, by best-fit decreasing: the longest chunk first, each into
    the sequence with the least room that it fits into. Within a few percent of the fewest possible sequences.

    Source: Johnson 1973, "Near-optimal bin packing algorithms"; for language models Ding et al. 2024,
    https://arxiv.org/abs/2404.10830.
    """
    lengths = chunks.with_format("numpy")["length"][:]
    sequences: list[list[int]] = []
    by_room: dict[int, list[list[int]]] = {}  # the sequences that have so much room left
    rooms: list[int] = []  # the keys of by_room, sorted
    for row in np.argsort(-lengths, kind="stable").tolist():
        i = bisect_left(rooms, lengths[row])
        if i < len(rooms):
            room = rooms[i]
            sequence = by_room[room].pop()
            if not by_room[room]:
                del by_room[room], rooms[i]
        else:
            room, sequence = sequence_length, []
            sequences.append(sequence)
        sequence.append(row)
        if left := room - int(lengths[row]):
            if left not in by_room:
                by_room[left] = []
                insort(rooms, left)
            by_room[left].append(sequence)
    starts = np.cumsum([0, *map(len, sequences)])
    return Sequences(chunks.with_format("numpy"), np.concatenate(sequences), starts)
