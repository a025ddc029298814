"""A training set that keeps only a window in memory: rows are tokenized and packed when it is their turn."""

import hashlib
import math
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from threading import Thread
from typing import Any

import numpy as np
from datasets import Dataset
from datasets.fingerprint import Hasher

from src.config.errors import UserError
from src.tasks.text.packing import ChunkLists, best_fit
from src.tasks.text.reading import CODE, Encoders, Source, TableReader, TextTask, cache_folder
from src.tasks.text.streaming.blocks import Blocks, Maker
from src.tasks.text.streaming.order import Order

PLACES, SAMPLED = 8, 1024
"""Evenly spaced places in each source, and rows sampled at each, to estimate how long rows are."""
WIDENING = 1.02
"""Factor by which sequences are lengthened until a window's chunks fit into them."""


@dataclass(frozen=True, eq=False)
class Stream:
    """Holds the sequences of an epoch, of one or more chunks each: a map-style dataset, to be read in ascending order.

    How many sequences a window's rows make is fixed before they are read, from the index and a sample. So a sequence's
    number tells its window, whatever was read before.
    """

    order: Order
    sources: list[Source]
    blocks: Blocks
    capacity: int | None
    """Tokens of a sequence, if possible; None: each sequence is one chunk, and each row has one."""
    counts: np.ndarray
    """Number of sequences in each window, from `count_sequences`."""
    seed: int = 0
    epoch: int = 0
    _read: dict[int, Future[ChunkLists]] = field(default_factory=dict, init=False)
    """Windows that are being read or have been read, by number."""

    def __len__(self) -> int:
        return int(self.counts.sum())

    def __getitems__(self, indices: list[int]) -> ChunkLists:
        ends = np.cumsum(self.counts)
        windows = np.searchsorted(ends, indices, side="right")
        places = indices - (ends - self.counts)[windows]
        return [self._window(window)[place] for window, place in zip(windows.tolist(), places.tolist(), strict=True)]

    def describe(self, _sequence_length: int) -> dict[str, float]:
        """Return what is known before the rows are read."""
        return {"sequences": len(self), "rows": int(self.order.totals.sum()), "windows": len(self.counts)}

    def fingerprint(self) -> str:
        """Return a checksum that changes with the rows, their order, or the sequences that they make."""
        of = self.blocks
        made = Hasher.hash([[*of.columns], of.maker, of.skips_bad_rows])
        parts = [*(source.fingerprint for source in self.sources), made, self.capacity]
        arrays = [*self.order.groups, *self.order.masses, self.order.shares, self.counts]
        return hashlib.sha256(str(parts).encode() + b"".join(array.tobytes() for array in arrays)).hexdigest()

    def _window(self, number: int) -> ChunkLists:
        """Return a window, and start reading the next one."""
        near = range(number, min(number + 2, len(self.counts)))
        for other in self._read.keys() - near:
            del self._read[other]
        for window in near:
            if window not in self._read:
                self._read[window] = in_thread(partial(self.read_window, window))
        return self._read[number].result()

    def read_window(self, number: int) -> ChunkLists:
        """Return the sequences of a window, shuffled; one without chunks is all padding."""
        sources, rows = self.order.rows(self.seed, self.epoch, number)
        of_source = [self.blocks.read(source, rows[sources == i]) for i, source in enumerate(self.sources)]
        chunks = [chunk | {"source": i} for i in sources.tolist() for chunk in next(of_source[i])]
        count = int(self.counts[number])
        sequences = [[i] for i in range(count)]
        if self.capacity:
            sequences = packed([len(chunk["input_ids"]) for chunk in chunks], self.capacity, count)
        shuffled = np.random.default_rng([self.seed, 2, self.epoch, number]).permutation(count)
        return [[chunks[i] for i in sequences[place]] for place in shuffled]


def build_stream(task: TextTask, rows: list[Any], columns: Encoders, maker: Maker, capacity: int | None) -> Stream:
    """Return a task's training set: sequences of `capacity` tokens, if possible, or of one chunk each if that is None.
    `rows` are the tables or Sources of the task's parts; the other arguments are those of Blocks."""
    parts, skips = task.parts, task.bad_rows == "skip"
    sources = [
        TableReader(read, part.dataset) if isinstance(read, Dataset) else read
        for read, part in zip(rows, parts, strict=True)
    ]
    key = Hasher.hash([columns, maker, skips, CODE])
    blocks = Blocks(columns, maker, skips, key, cache_folder() / "blocks", int(task.cache_gb * 1e9))
    weights, passes = [part.weight for part in parts], [part.max_epochs for part in parts]
    groups = [source.sizes for source in sources]
    # if each row is a sequence, windows are measured in rows
    masses = [masses_of(source) for source in sources] if capacity else groups
    order = Order(groups, masses, weights, passes, task.shuffle_window)
    return Stream(order, sources, blocks, capacity, count_sequences(order, sources, blocks, capacity))


def masses_of(source: Source) -> np.ndarray:
    """Return the weight of each group of a source, by its bytes, in rows of mean size; float64."""
    sizes = source.sizes * source.row_bytes
    return sizes * (source.sizes.sum() / sizes.sum())


def count_sequences(order: Order, sources: list[Source], blocks: Blocks, capacity: int | None) -> np.ndarray:
    """Return how many sequences each window makes; shape (windows,), int64.

    If `capacity` is None, one for each row. Otherwise, as many as hold the tokens of its rows with high probability:
    the number that a sample predicts, plus two standard deviations of the prediction's error.
    """
    if capacity is None:
        return order.shares.sum(axis=1)
    tokens, variance = np.zeros((2, len(order.shares)))
    lengths: list[int] = []
    for source, masses, share in zip(sources, order.masses, order.shares.T, strict=True):
        size = int(source.sizes.sum())
        starts = np.linspace(0, size, PLACES, endpoint=False).astype(int)
        sample = np.unique(np.minimum(starts[:, None] + np.arange(SAMPLED), size - 1))
        # one place at a time: rows may be long, and blocks are kept until all of a place's rows are read
        places = np.array_split(sample, min(PLACES, len(sample)))
        by_row = chain.from_iterable(blocks.read(source, rows) for rows in places)
        in_rows = [[len(chunk["input_ids"]) for chunk in chunks] for chunks in by_row]
        lengths += chain.from_iterable(in_rows)
        found = np.array([*map(sum, in_rows)])
        groups = np.searchsorted(np.cumsum(source.sizes), sample, side="right")
        expected = masses[groups] / source.sizes[groups]
        # tokens per row of mean size, overall and at each place
        mean = found.sum() / expected.sum()
        by_place = zip(np.array_split(found, len(places)), np.array_split(expected, len(places)), strict=True)
        of_place = np.var([part.sum() / mass.sum() for part, mass in by_place], ddof=min(1, len(places) - 1))
        of_row = np.var(found - mean * expected)
        # groups vary as places do, minus what comes from having few rows at a place
        of_group = max(0.0, of_place - of_row * len(places) / len(sample)) * size / len(source.sizes)
        tokens += mean * share
        variance += share * (of_row + of_group) * np.maximum(0.0, 1 - share / size)  # none if a window has all rows
        variance += share**2 * of_place / len(places) * (1 - len(sample) / size)  # the variance of the mean itself
    if not any(lengths):
        raise UserError("no row in a sample of the training data can be used: is this the right column?")
    # how full best-fit packing makes sequences; the last one is half full on average
    efficiency = min(1.0, sum(lengths) / ((len(best_fit(np.array(lengths), capacity)) - 0.5) * capacity))
    return np.maximum(1, np.ceil((tokens + 2 * np.sqrt(variance)) / (efficiency * capacity))).astype(np.int64)


def packed(lengths: list[int], capacity: int, count: int) -> list[list[int]]:
    """Return the chunks in each of `count` sequences. If `capacity` would make more sequences, they are longer; if it
    makes fewer, the rest are empty."""
    size = max(capacity, math.ceil(sum(lengths) / count))
    while len(sequences := best_fit(np.array(lengths), size)) > count:
        size = math.ceil(size * WIDENING)
    return sequences + [[] for _ in range(count - len(sequences))]


def in_thread(read: Callable[[], ChunkLists]) -> Future[ChunkLists]:
    """Start reading in a thread. It is not a daemon: if stopped in the middle of a read, Arrow crashes the interpreter.
    Nor is it from a ThreadPoolExecutor, whose threads are joined before `main_thread` counts as ended, which is what
    stops a read."""
    future: Future[ChunkLists] = Future()

    def run() -> None:
        try:
            future.set_result(read())
        except BaseException as error:
            future.set_exception(error)

    Thread(target=run).start()
    return future
