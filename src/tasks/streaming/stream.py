"""A training set that keeps only a window in memory: rows are tokenized and packed when it is their turn."""

import math
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import cached_property, partial
from itertools import chain, pairwise
from threading import Thread

import numpy as np
import pyarrow as pa
from datasets.fingerprint import Hasher

from src.config.errors import UserError
from src.tasks.streaming.blocks import Blocks
from src.tasks.streaming.order import Order
from src.tasks.text.packing import Chunk, ChunkLists, best_fit
from src.tasks.text.reading import BLOCK, Source

SAMPLES = (8, 16, 32, 64)
"""Blocks of each source that are sampled, evenly spaced, to estimate its tokens per byte: more, until two standard
errors are within PRECISION."""
PRECISION = 0.004
"""Fraction of padding that the error of an estimate of tokens per byte may cause."""
SPAN = 32
"""Windows, or more if they are small. A run that is resumed on another machine reads up to so many again."""
FULL = 0.97
"""Fraction of the tokens of the best packed sequences that a full one has."""
WIDENING = 1.02
"""Factor by which sequences are lengthened until a window's chunks fit into them."""


def as_chunks(table: pa.Table) -> list[Chunk]:
    """Return the rows of a table. Lists are slices of one array for all, which is much faster than a list for each."""
    names = table.column_names  # asking Arrow for each row would take most of the time
    columns = []
    for name in names:
        column = table[name].combine_chunks()
        if pa.types.is_list(column.type):
            array = column.values.to_numpy()
            columns.append([array[i:j] for i, j in pairwise(column.offsets.tolist())])
        else:
            columns.append(column.to_pylist())
    return [dict(zip(names, row, strict=True)) for row in zip(*columns, strict=True)]


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
    _read: dict[int, Future[ChunkLists]] = field(default_factory=dict, init=False)
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

    @property
    def num_rows(self) -> int:
        """Return the rows of an epoch."""
        return int(self.order.totals.sum())

    def describe(self, _sequence_length: int) -> dict[str, float]:
        """Return what is known before the rows are read."""
        return {"sequences": len(self), "rows": self.num_rows, "windows": len(self.counts)}

    def fingerprint(self) -> str:
        """Return a checksum that changes with the rows, their order, or the sequences that they make."""
        of, order = self.blocks, self.order
        rows = [source.fingerprint for source in self.sources], order.groups, order.masses, order.shares
        return Hasher.hash([rows, [*of.columns], of.chunker, of.skips_bad_rows, self.capacity, self.counts, self.span])

    def _window(self, number: int) -> ChunkLists:
        """Return a window, and start reading the next one."""
        near = range(number, min(number + 2, len(self.counts)))
        for other in self._read.keys() - near:
            del self._read[other]
        for other in [*self._left]:
            if other // self.span < number // self.span:
                del self._left[other]
        for window in near:
            if window not in self._read:
                self._read[window] = in_thread(partial(self.read_window, window))
        return self._read[number].result()

    def read_window(self, number: int) -> ChunkLists:
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
        # what is left over of others comes after the window's own rows
        order = np.argsort(np.concatenate(places), kind="stable")
        order = np.append(order, np.arange(len(order), len(chunks)))
        count = int(self.counts[number])
        sequences = [[i] for i in range(len(order))]
        if self.capacity:
            sequences = packed(chunks["length"].to_numpy()[order], self.capacity, count, is_last)
        if not is_last:
            self._left[number] = chunks.take(order[[*chain.from_iterable(sequences[count:])]])
        shuffled = np.random.default_rng([self.seed, 2, self.epoch, number]).permutation(count)
        # reorder references to the chunks, not their tokens
        unordered = as_chunks(chunks)
        in_order = [unordered[i] for i in order]
        return [[in_order[i] for i in sequences[place]] for place in shuffled]

    def _left_of(self, number: int) -> pa.Table:
        """Return what is left over of a window; after a resume, it may have to be read again."""
        if number in self._read:
            self._read[number].result()
        if number not in self._left:
            self.read_window(number)
        return self._left[number]


def masses_of(source: Source) -> np.ndarray:
    """Return the weight of each group of a source, by its bytes, in rows of mean size; float64."""
    sizes = source.sizes * source.row_bytes
    return sizes * (source.sizes.sum() / sizes.sum())


def count_sequences(
    order: Order, sources: list[Source], blocks: Blocks, capacity: int | None
) -> tuple[np.ndarray, int]:
    """Return how many sequences each window has, shape (windows,), int64; and the span.

    If `capacity` is None, one for each row. Otherwise, a span has as many as hold the tokens of its rows with high
    probability; its windows have as many as they fill for certain, and the last one the rest.
    """
    if capacity is None:
        return order.shares.sum(axis=1), 1
    samples = [sample(order, number, source, blocks, capacity) for number, source in enumerate(sources)]
    lengths, least, most = zip(*samples, strict=True)
    all_lengths = np.concatenate(lengths)
    if not all_lengths.any():
        raise UserError("no row in a sample of the training data can be used: is this the right column?")
    # tokens in a sequence of best-fit packing; the last one is half full on average
    full = min(capacity, all_lengths.sum() / (len(best_fit(all_lengths, capacity)) - 0.5))
    counts, windows = np.floor(order.shares @ least / full), len(order.shares)
    span = math.ceil(windows / max(1, windows // max(SPAN, SAMPLES[-1] * BLOCK // order.window)))
    starts = np.arange(0, windows, span)
    lasts = np.append(starts[1:], windows) - 1
    counts[lasts] = 0
    # windows that are packed apart are less full
    in_span = np.ceil(np.add.reduceat(order.shares @ most, starts) / full * (1 + PRECISION))
    counts[lasts] = np.maximum(1, in_span - np.add.reduceat(counts, starts))
    return counts.astype(np.int64), span


def sample(order: Order, number: int, source: Source, blocks: Blocks, capacity: int) -> tuple[np.ndarray, float, float]:
    """Return the tokens of each chunk in a sample of a source, the one with this number in the order. And the tokens
    per row of mean size: at least, in any window, counting FULL sequences only; and at most, in the whole source."""
    ends, shifts, masses = order.shuffled(0, number, 0)
    sizes, masses = np.diff(ends, prepend=0), np.diff(masses)
    firsts = ends - sizes + shifts
    in_source = np.argsort(firsts)
    for count in SAMPLES:
        count = min(count, len(ends))
        chosen = in_source[((np.arange(count) + 0.5) * len(ends) / count).astype(int)]
        rows = [np.arange(firsts[i], firsts[i] + sizes[i]) for i in chosen]
        found = [blocks.read(source, of_block)["length"].to_numpy() for of_block in rows]
        tokens, size = np.array([lengths.sum() for lengths in found]), masses[chosen].sum()
        mean = tokens.sum() / size
        # from neighbours, as blocks are spread evenly, even if the source is sorted; none if it is all sampled
        off = np.diff(tokens - mean * masses[chosen])
        error = np.sqrt(np.sum(off**2) / 2 * (1 - count / len(ends))) / size
        if 2 * error <= PRECISION * mean:
            break
    # windows are like parts of the sample that are spread evenly over it
    cuts = -(-BLOCK // order.window)
    pieces = [piece for lengths in found for piece in np.array_split(lengths, cuts)]
    weights = np.repeat(masses[chosen] / cuts, cuts)
    parts = min(len(pieces), max(SAMPLES[0], int(size) // order.window))
    full = FULL * np.median(fills(np.concatenate(found), capacity))
    in_parts = []
    for part in range(parts):
        tokens = fills(np.concatenate(pieces[part::parts]), capacity)
        in_parts.append(tokens[tokens >= full].sum() / weights[part::parts].sum())
    # as far below the poorest as that is below the mean
    least = max(0.0, 2 * min(in_parts) - float(np.mean(in_parts)))
    return np.concatenate(found), least, mean + 2 * error


def fills(lengths: np.ndarray, capacity: int) -> np.ndarray:
    """Return the number of tokens in each sequence of chunks of these lengths; shape (sequences,), int64."""
    return np.array([lengths[sequence].sum() for sequence in best_fit(lengths, capacity)])


def packed(lengths: np.ndarray, capacity: int, count: int, is_last: bool) -> list[list[int]]:
    """Return the chunks in each of `count` sequences, and then those of sequences that are left over; none if the
    window `is_last`, whose sequences are longer if they have to be. If there are too few, the rest are empty."""
    size = max(capacity, math.ceil(lengths.sum() / max(count, 1))) if is_last else capacity
    while len(sequences := best_fit(lengths, size)) > count and is_last:
        size = math.ceil(size * WIDENING)
    size_of = lengths.tolist().__getitem__
    fullest_first = sorted(sequences, key=lambda sequence: -sum(map(size_of, sequence)))
    return fullest_first + [[]] * (count - len(sequences))


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
