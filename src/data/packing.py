"""Several pieces of text in one sequence: less padding, and nothing dropped."""

from __future__ import annotations

from bisect import bisect_left, insort
from dataclasses import dataclass
from typing import Any

import numpy as np
from datasets import Dataset


@dataclass(frozen=True)
class Sequences:
    """Sequences of one or more pieces: a map-style dataset that is asked for whole batches.

    An example is a list of pieces, each `input_ids` and `labels` of shape (length,), int32, and `bytes`, an int.
    """

    pieces: Dataset
    """A table of pieces: see src/data/documents.py."""
    rows: np.ndarray
    """The pieces' rows in the table, sequence by sequence; shape (pieces,), int64."""
    starts: np.ndarray
    """Where in `rows` each sequence begins, and where the last ends; shape (sequences + 1,), int64."""

    def __len__(self) -> int:
        return len(self.starts) - 1

    def __getitems__(self, indices: list[int]) -> list[list[dict[str, Any]]]:
        groups = [self.rows[self.starts[i] : self.starts[i + 1]] for i in indices]
        found = self.pieces[np.concatenate(groups)]
        columns = zip(found["input_ids"], found["labels"], found["bytes"], strict=True)
        pieces = iter([{"input_ids": ids, "labels": labels, "bytes": size} for ids, labels, size in columns])
        return [[next(pieces) for _ in group] for group in groups]

    def describe(self, sequence_length: int) -> dict[str, float]:
        """What is in it; `padding` is the share of the tokens where each sequence is padded to `sequence_length`."""
        columns = self.pieces.with_format("arrow")[:]
        tokens = columns["length"].to_numpy().sum(dtype=np.int64).item()
        return {
            "sequences": len(self),
            "tokens": tokens,
            "targets": columns["targets"].to_numpy().sum(dtype=np.int64).item(),
            "padding": 1 - tokens / (len(self) * sequence_length),
            "truncated": int(columns["truncated"].to_numpy().sum()),
            "without_targets": int((columns["targets"].to_numpy() == 0).sum()),
        }


def unpacked(pieces: Dataset) -> Sequences:
    """A sequence for each piece."""
    count = len(pieces)
    return Sequences(pieces.with_format("numpy"), np.arange(count), np.arange(count + 1))


def packed(pieces: Dataset, sequence_length: int) -> Sequences:
    """Sequences of up to `sequence_length` tokens, by best-fit decreasing: the longest piece first, each into the
    sequence with the least room that it fits into. Within a few percent of the fewest possible sequences.

    Source: Johnson 1973, "Near-optimal bin packing algorithms"; for language models Ding et al. 2024,
    https://arxiv.org/abs/2404.10830.
    """
    lengths = pieces.with_format("arrow")[:]["length"].to_numpy()
    sequences: list[list[int]] = []
    by_room: dict[int, list[int]] = {}  # sequences with so much room left
    rooms: list[int] = []  # the keys of by_room, in order
    for row in np.argsort(-lengths, kind="stable").tolist():
        length = int(lengths[row])
        i = bisect_left(rooms, length)
        if i < len(rooms):
            room = rooms[i]
            sequence = by_room[room].pop()
            if not by_room[room]:
                del by_room[room], rooms[i]
        else:
            room, sequence = sequence_length, len(sequences)
            sequences.append([])
        sequences[sequence].append(row)
        if left := room - length:
            if left not in by_room:
                by_room[left] = []
                insort(rooms, left)
            by_room[left].append(sequence)
    starts = np.cumsum([0] + [len(sequence) for sequence in sequences])
    rows = np.concatenate([np.array(sequence, np.int64) for sequence in sequences])
    return Sequences(pieces.with_format("numpy"), rows, starts)
