"""Packing of several chunks into one sequence: less padding, and nothing dropped."""

from bisect import bisect_left, insort
from dataclasses import dataclass
from itertools import chain
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from datasets import Dataset

from src.tasks.base import Tensors
from src.tasks.text.rows import table_checksum

Chunk = dict[str, Any]
"""A row of a table of chunks: `input_ids` and `labels` of shape (length,), int64, and figures about them."""
ChunkLists = list[list[Chunk]]
"""The chunks of each row of the data, or of each sequence."""


@dataclass(frozen=True)
class Sequences:
    """Holds sequences of one or more chunks: a map-style dataset whose examples are lists of chunks."""

    chunks: Dataset
    """A table of chunks in numpy format: see tokenizing.py."""
    sequences: pa.Array
    """The rows of the table that each sequence has; lists of int64."""
    num_rows: int
    """Rows of the data that the chunks were made from."""

    def __len__(self) -> int:
        return len(self.sequences)

    def __getitems__(self, indices: list[int]) -> ChunkLists:
        sequences = self.sequences.take(indices).to_pylist()
        chunks = iter(self.chunks.__getitems__([*chain(*sequences)]))
        return [[next(chunks) for _ in sequence] for sequence in sequences]

    def fingerprint(self) -> str:
        """Return a checksum that changes with any token or label."""
        return table_checksum(self.chunks, ["input_ids", "labels"])

    def describe(self, sequence_length: int) -> dict[str, float]:
        """Return counts, and the fraction of `padding` if each sequence is padded to `sequence_length`."""
        columns = self.chunks.select_columns(["length", "targets", "truncated"])[:]
        tokens, targets, truncated = (int(values.sum()) for values in columns.values())
        return {
            "sequences": len(self),
            "tokens": tokens,
            "targets": targets,
            "padding": 1 - tokens / (len(self) * sequence_length),
            "truncated": truncated,
            "without_targets": int((columns["targets"] == 0).sum()),
        }


def batch_tensors(samples: ChunkLists, width: int, padding: int) -> tuple[Tensors, list[int]]:
    """Return the inputs for a LanguageModel's loss on these examples, in rows of `width` tokens with `padding` at the
    end; and where in the flattened batch each document ends, counting padding as a document."""
    input_ids = np.full((len(samples), width), padding)
    labels = np.full((len(samples), width), -100)
    position_ids = np.tile(np.arange(width), (len(samples), 1))
    ends = []
    for row, sample in enumerate(samples):
        start = 0
        for chunk in sample:
            end = start + len(chunk["input_ids"])
            input_ids[row, start:end], labels[row, start:end] = chunk["input_ids"], chunk["labels"]
            position_ids[row, start:] -= position_ids[row, start]
            ends.append(row * width + end)
            start = end
        ends.append((row + 1) * width)
    index = np.flatnonzero(labels != -100)
    arrays = {"input_ids": input_ids, "position_ids": position_ids, "index": index, "targets": labels.flat[index]}
    return {name: torch.from_numpy(array) for name, array in arrays.items()}, ends


def pack(chunks: Dataset, capacity: int | None, num_rows: int) -> Sequences:
    """Return the chunks of `num_rows` rows packed into sequences of up to `capacity` tokens; None: each chunk is a
    sequence."""
    chunks = chunks.with_format("numpy")
    sequences = best_fit(chunks["length"][:], capacity) if capacity else [[row] for row in range(len(chunks))]
    return Sequences(chunks, pa.array(sequences), num_rows)


def best_fit(lengths: np.ndarray, capacity: int) -> list[list[int]]:
    """Return which chunks share a sequence, by best-fit decreasing: from the longest chunk on, place each into the
    fullest sequence that has room for it. Within a few percent of the fewest possible sequences.

    Source: Johnson 1973, "Near-optimal bin packing algorithms"; for language models Ding et al. 2024,
    https://arxiv.org/abs/2404.10830.

    Args:
        lengths: tokens of each chunk, at most `capacity`; shape (chunks,).
        capacity: tokens that a sequence holds.
    """
    order = np.argsort(-lengths, kind="stable")
    sequences: list[list[int]] = []
    by_room: list[list[list[int]]] = [[] for _ in range(capacity + 1)]  # sequences by the room left in them
    rooms: list[int] = []  # the rooms that some sequence has, in ascending order
    for row, length in zip(order.tolist(), lengths[order].tolist(), strict=True):
        i = bisect_left(rooms, length)
        if i < len(rooms):
            room = rooms[i]
            sequence = by_room[room].pop()
            if not by_room[room]:
                del rooms[i]
        else:  # no sequence has room
            room, sequence = capacity, []
            sequences.append(sequence)
        sequence.append(row)
        if left := room - length:
            if not by_room[left]:
                insort(rooms, left)
            by_room[left].append(sequence)
    return sequences
