"""A training set that keeps only a window in memory: rows are tokenized and packed when it is their turn."""

import hashlib
import math
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import cached_property, partial
from itertools import chain
from threading import Thread
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
from datasets import Dataset
from datasets.fingerprint import Hasher

from src.config.errors import UserError
from src.tasks.text.packing import Chunk, ChunkLists, best_fit
from src.tasks.text.reading import BLOCK, CODE, Encoders, Source, TableReader, TextTask, cache_folder
from src.tasks.text.streaming.blocks import Blocks, Maker
from src.tasks.text.streaming.order import Order

PLACES = (8, 16, 32, 64)
"""Blocks of each source that are sampled, evenly spaced, to estimate its tokens per byte: more, until two standard
errors are within PRECISION."""
PRECISION = 0.004
"""Fraction of padding that each of two errors of a forecast may cause: of tokens per byte, and of what is in a span."""
LONGEST_SPAN = 64
"""Windows, or more if they are small. A run that is resumed on another machine reads up to so many again."""
FULL = 0.97
"""Fraction of a full sequence's tokens that are no padding."""
WIDENING = 1.02
"""Factor by which sequences are lengthened until a window's chunks fit into them."""


class Window:
    """Holds the sequences of a window, given which chunks of a table each has; and `left`, the chunks for others."""

    def __init__(self, chunks: pa.Table, sequences: list[np.ndarray], left: pa.Table) -> None:
        self.left = left
        self._starts = np.cumsum([0, *map(len, sequences)]).tolist()
        chunks = chunks.take(np.concatenate([np.empty(0, np.int64), *sequences]))
        self._columns: dict[str, tuple[Any, list[int]]] = {}
        for name in chunks.column_names:
            column = chunks[name].combine_chunks()
            if pa.types.is_large_list(column.type):
                self._columns[name] = column.values.to_numpy(), column.offsets.tolist()
            else:
                self._columns[name] = column.to_pylist(), []

    def __getitem__(self, place: int) -> list[Chunk]:
        return [
            {name: of[ends[i] : ends[i + 1]] if ends else of[i] for name, (of, ends) in self._columns.items()}
            for i in range(self._starts[place], self._starts[place + 1])
        ]


@dataclass(frozen=True, eq=False)
class Stream:
    """Holds the sequences of an epoch, of one or more chunks each: a map-style dataset, to be read in ascending order.

    How many sequences a window has is fixed before its rows are read, from the index and a sample. So a sequence's
    number tells its window, whatever was read before. What is left over of a window goes into the last of its span.
    """

    order: Order
    sources: list[Source]
    blocks: Blocks
    capacity: int | None
    """Tokens of a sequence, if possible; None: each sequence is one chunk, and each row has one."""
    counts: np.ndarray
    """Number of sequences in each window, from `count_sequences`, as the next one."""
    span: int
    """Windows whose leftovers the last of them takes."""
    seed: int = 0
    epoch: int = 0
    _read: dict[int, Future[Window]] = field(default_factory=dict, init=False)
    """Windows that are being read or have been read, by number."""
    _left: dict[int, pa.Table] = field(default_factory=dict, init=False)
    """What is left over of those before them in the span."""

    def __len__(self) -> int:
        return int(self.counts.sum())

    @cached_property
    def _ends(self) -> np.ndarray:
        return np.cumsum(self.counts)

    def __getitems__(self, indices: list[int]) -> ChunkLists:
        windows = np.searchsorted(self._ends, indices, side="right")
        places = indices - (self._ends - self.counts)[windows]
        return [self._window(window)[place] for window, place in zip(windows.tolist(), places.tolist(), strict=True)]

    def describe(self, _sequence_length: int) -> dict[str, float]:
        """Return what is known before the rows are read."""
        return {"sequences": len(self), "rows": int(self.order.totals.sum()), "windows": len(self.counts)}

    def fingerprint(self) -> str:
        """Return a checksum that changes with the rows, their order, or the sequences that they make."""
        of = self.blocks
        made = Hasher.hash([[*of.columns], of.maker, of.skips_bad_rows])
        parts = [*(source.fingerprint for source in self.sources), made, self.capacity, self.span]
        arrays = [*self.order.groups, *self.order.masses, self.order.shares, self.counts]
        return hashlib.sha256(str(parts).encode() + b"".join(array.tobytes() for array in arrays)).hexdigest()

    def _window(self, number: int) -> Window:
        """Return a window, and start reading the next one."""
        near = range(number, min(number + 2, len(self.counts)))
        for other in self._read.keys() - near:
            done = self._read.pop(other)
            if not done.exception():
                self._left[other] = done.result().left
        for other in [*self._left]:
            if other // self.span != number // self.span:
                del self._left[other]
        for window in near:
            if window not in self._read:
                self._read[window] = in_thread(partial(self.read_window, window))
        return self._read[number].result()

    def read_window(self, number: int) -> Window:
        """Return the sequences of a window, shuffled; one without chunks is all padding."""
        sources, rows = self.order.rows(self.seed, self.epoch, number)
        places, tables = [], []
        for i, source in enumerate(self.sources):
            own = np.flatnonzero(sources == i)
            if len(own) or not len(rows):
                table = self.blocks.read(source, rows[own])
                places.append(own[table["row"]])
                tables.append(table.drop_columns("row").append_column("source", [np.full(len(table), i)]))
        first, is_last = number - number % self.span, (number + 1) % self.span == 0 or number + 1 == len(self.counts)
        tables += [self._left_of(window) for window in range(first, number) if is_last]
        chunks = pa.concat_tables(tables, promote_options="permissive")
        order = np.argsort(np.concatenate(places), kind="stable")
        order = np.append(order, np.arange(len(order), len(chunks)))
        count = int(self.counts[number])
        sequences = [[i] for i in range(len(order))]
        if self.capacity:
            sequences = packed(chunks["length"].to_numpy()[order], self.capacity, count, is_last)
        left = chunks.take(order[[*chain.from_iterable(sequences[count:])]])
        shuffled = np.random.default_rng([self.seed, 2, self.epoch, number]).permutation(count)
        return Window(chunks, [order[sequences[place]] for place in shuffled], left)

    def _left_of(self, number: int) -> pa.Table:
        """Return what is left over of a window; after a resume, it may have to be read again."""
        if number in self._read:
            return self._read[number].result().left
        return self._left[number] if number in self._left else self.read_window(number).left


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
    return Stream(order, sources, blocks, capacity, *count_sequences(order, sources, blocks, capacity))


def masses_of(source: Source) -> np.ndarray:
    """Return the weight of each group of a source, by its bytes, in rows of mean size; float64."""
    sizes = source.sizes * source.row_bytes
    return sizes * (source.sizes.sum() / sizes.sum())


def count_sequences(
    order: Order, sources: list[Source], blocks: Blocks, capacity: int | None
) -> tuple[np.ndarray, int]:
    """Return how many sequences each window has, shape (windows,), int64; and the span.

    If `capacity` is None, one for each row. Otherwise, a span has as many as hold the tokens of its rows with high
    probability: the number that a sample predicts, plus two standard deviations of the prediction's error. Its windows
    have as many as they fill with the same probability, and the last one the rest.
    """
    if capacity is None:
        return order.shares.sum(axis=1), 1
    samples = [Sample.of(source, masses, blocks) for source, masses in zip(sources, order.masses, strict=True)]
    lengths = np.concatenate([lengths for sample in samples for lengths in sample.lengths])
    if not lengths.any():
        raise UserError("no row in a sample of the training data can be used: is this the right column?")
    # how full best-fit packing makes sequences; the last one is half full on average
    full = capacity * min(1.0, lengths.sum() / ((len(best_fit(lengths, capacity)) - 0.5) * capacity))

    def bound(shares: np.ndarray, deviations: float, is_span: bool) -> np.ndarray:
        of_sources = zip(samples, shares.T, strict=True)
        mean, variance = np.sum([sample.forecast(share, is_span) for sample, share in of_sources], axis=0)
        return (mean + deviations * np.sqrt(variance)) / full

    windows, expected = len(order.shares), bound(order.shares, 0, False)
    counts = np.maximum(0, bound(order.shares, -2, False))
    needed = np.mean((expected - counts) / expected / PRECISION) ** 2
    if order.window < PLACES[0] * BLOCK:  # rows of few blocks may not fill sequences, if the source is sorted
        counts *= min(filled(lengths, capacity) for sample in samples for lengths in sample.lengths)
    counts = np.floor(counts)
    longest = max(LONGEST_SPAN, PLACES[-1] * BLOCK // order.window)
    span = math.ceil(windows / max(1, windows // int(np.clip(needed, 1, longest))))
    starts = np.arange(0, windows, span)
    lasts = np.append(starts[1:], windows) - 1
    counts[lasts] = 0
    # windows that are packed apart are less full
    in_span = np.ceil(bound(np.add.reduceat(order.shares, starts), 2, True) * (1 + PRECISION))
    counts[lasts] = np.maximum(1, in_span - np.add.reduceat(counts, starts))
    return counts.astype(np.int64), span


class Sample(NamedTuple):
    """Estimates the tokens of rows from some blocks of a source."""

    lengths: list[np.ndarray]
    """Tokens of the chunks of each block; shape (chunks,)."""
    size: int
    """Rows of the source."""
    mean: float
    """Tokens per row of mean size."""
    error: float
    """Standard error of that."""
    variances: tuple[float, float]
    """Of the tokens in a row of mean size: in whole blocks from anywhere, and in as many from all parts of a source."""
    row_variance: float
    """Of the tokens in a row within its block."""

    @classmethod
    def of(cls, source: Source, masses: np.ndarray, blocks: Blocks) -> "Sample":
        """Return the estimates, given the weight of each group in rows of mean size."""
        in_group, befores = -(-source.sizes // BLOCK), np.cumsum(source.sizes) - source.sizes
        ends, total = np.cumsum(in_group), int(in_group.sum())
        for number in PLACES:
            number = min(number, total)
            found, lengths, in_rows = [], [], []
            for place in ((np.arange(number) + 0.5) * total / number).astype(int):
                group = int(np.searchsorted(ends, place, side="right"))
                first = int(place - ends[group] + in_group[group]) * BLOCK
                last = min(first + BLOCK, int(source.sizes[group]))
                chunks = blocks.read(source, befores[group] + np.arange(first, last))
                lengths.append(chunks["length"].to_numpy())
                in_rows.append(np.bincount(chunks["row"], lengths[-1]))
                shares = (last - first) / source.sizes[group], source.part(group, first, last, blocks.columns)
                found.append([lengths[-1].sum(), *(masses[group] * share for share in shares)])
            tokens, by_rows, by_bytes = np.array(found).T
            mean = tokens.sum() / by_bytes.sum()
            off, off_by_bytes = tokens - mean * by_rows, tokens - mean * by_bytes
            error = np.sqrt(_local_variance(off_by_bytes) * number * (1 - number / total)) / by_bytes.sum()
            if 2 * error <= PRECISION * mean:
                break
        variances = np.var(off) / by_rows.mean(), _local_variance(off) / by_rows.mean()
        row_variance = float(np.mean([*map(np.var, in_rows)]))
        return cls(lengths, int(source.sizes.sum()), mean, error, variances, row_variance)

    def forecast(self, share: np.ndarray, is_span: bool) -> tuple[np.ndarray, np.ndarray]:
        """Return how many tokens so many rows of mean size have, in one window or in a span of many, and the variance
        of the error."""
        rest = np.maximum(0, 1 - share / self.size)  # no error if it has all rows
        of_cut = np.minimum(share, BLOCK / 3)  # blocks at both ends are cut: on average n/6 rows' variance each
        variance = rest * (share * self.variances[is_span] + of_cut * self.row_variance)
        return self.mean * share, variance + (self.error * share) ** 2


def _local_variance(values: np.ndarray) -> float:
    """Return the variance of neighbours: that of samples which are spread evenly over a source, as those of a span are
    too, even if it is sorted."""
    return float(np.sum(np.diff(values) ** 2) / 2 / max(1, len(values) - 1))


def filled(lengths: np.ndarray, capacity: int) -> float:
    """Return which fraction of these tokens is in sequences that are FULL."""
    sizes = np.array([lengths[sequence].sum() for sequence in best_fit(lengths, capacity)])
    return float(sizes[sizes >= FULL * capacity].sum() / max(1, lengths.sum()))


def packed(lengths: np.ndarray, capacity: int, count: int, is_last: bool) -> list[list[int]]:
    """Return the chunks in each of `count` sequences, and then those of sequences that are left over; none if the
    window `is_last`, whose sequences are longer if they have to be. If there are too few, the rest are empty."""
    size = max(capacity, math.ceil(lengths.sum() / max(count, 1))) if is_last else capacity
    while len(sequences := best_fit(lengths, size)) > count and is_last:
        size = math.ceil(size * WIDENING)
    size_of = lengths.tolist().__getitem__
    fullest_first = sorted(sequences, key=lambda sequence: -sum(map(size_of, sequence)))
    return fullest_first + [[]] * (count - len(sequences))


def in_thread(read: Callable[[], Window]) -> Future[Window]:
    """Start reading in a thread. It is not a daemon: if stopped in the middle of a read, Arrow crashes the interpreter.
    Nor is it from a ThreadPoolExecutor, whose threads are joined before `main_thread` counts as ended, which is what
    stops a read."""
    future: Future[Window] = Future()

    def run() -> None:
        try:
            future.set_result(read())
        except BaseException as error:
            future.set_exception(error)

    Thread(target=run).start()
    return future
