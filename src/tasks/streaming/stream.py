"""A training set that keeps only a window in memory: rows are tokenized and packed when it is their turn."""

import math
import os
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import cached_property, partial
from itertools import chain
from threading import Thread

import numpy as np
import pyarrow as pa
from datasets.fingerprint import Hasher

from src.tasks.streaming.cache import TokenCache
from src.tasks.streaming.index import Source
from src.tasks.streaming.order import Cut, Epoch, order_epoch
from src.tasks.text.packing import Chunk, ChunkLists, best_fit

WIDENING = 1.02
"""Factor by which sequences are lengthened until a window's chunks fit into them."""


@dataclass(frozen=True, eq=False)
class Stream:
    """Holds the sequences of an epoch, of one or more chunks each: a map-style dataset, to be read in ascending order.

    Sequence k is in a window that is known before any row is read: see order.py.
    """

    sources: Sequence[Source]
    cache: TokenCache
    capacity: int | None
    """Tokens of a sequence, if possible; None: each sequence is one chunk, and each row has one."""
    num_rows: int
    """Rows of an epoch."""
    cut: Cut
    seed: int = 0
    number: int = 0
    """The number of the epoch, from 0 on."""
    _read: dict[int, Future[ChunkLists]] = field(default_factory=dict, init=False)
    """Windows that are being read or have been read, by number."""
    _left: dict[int, pa.Table] = field(default_factory=dict, init=False)
    """What is left over of those before them in the span."""

    def __len__(self) -> int:
        return self.cut.sequences

    @cached_property
    def epoch(self) -> Epoch:
        """Return the order of this epoch's rows."""
        return order_epoch(self.sources, self.cut, self.seed, self.number)

    def __getitems__(self, indices: list[int]) -> ChunkLists:
        starts = self.epoch.sequences
        windows = np.searchsorted(starts, indices, side="right") - 1
        places = indices - starts[windows]
        return [self._window(window)[place] for window, place in zip(windows.tolist(), places.tolist(), strict=True)]

    def describe(self, _sequence_length: int) -> dict[str, float]:
        """Return what is known before the rows are read."""
        return {"sequences": len(self), "rows": self.num_rows, "windows": self.cut.windows}

    def fingerprint(self) -> str:
        """Return a checksum that changes with the rows, their order, or the sequences that they make."""
        rows = [[of.fingerprint, of.rows, of.tokens, of.weight, of.passes] for of in self.sources]
        of = self.cache  # without its code: a run may be resumed after a change of that
        return Hasher.hash([rows, [*of.encoders], of.chunker, of.skips_bad_rows, self.capacity, self.cut])

    def _window(self, number: int) -> ChunkLists:
        """Return a window, and start reading the next one."""
        near = range(number, min(number + 2, len(self.epoch.windows) - 1))
        for other in self._read.keys() - near:
            del self._read[other]
        for other in [*self._left]:
            if other < number - number % self.cut.span:
                del self._left[other]
        for window in near:
            if window not in self._read:
                self._read[window] = in_thread(partial(self.read_window, window))
        return self._read[number].result()

    def read_window(self, number: int) -> ChunkLists:
        """Return the sequences of a window, shuffled; one without chunks is all padding."""
        random = np.random.default_rng([self.seed, 1, self.number, number])
        sources, blocks, windows, starts = self.epoch
        own = slice(windows[number], windows[number + 1])
        places = sorted(zip(sources[own].tolist(), blocks[own].tolist(), strict=True))  # one row group after the other
        # each process begins somewhere else, so that they do not wait for each other
        first = np.random.default_rng(os.getpid()).integers(len(places))
        read = {place: self.cache.read(self.sources[place[0]][place[1]]) for place in places[first:] + places[:first]}
        tables = [read[place].append_column("source", [np.full(len(read[place]), place[0])]) for place in places]
        is_last = (number + 1) % self.cut.span == 0 or number + 2 == len(windows)  # of its span
        tables += [self._left_of(other) for other in range(number - number % self.cut.span, number) if is_last]
        chunks = pa.concat_tables(tables)
        chunks = chunks.take(random.permutation(len(chunks)))
        count = int(starts[number + 1] - starts[number])
        sequences = [[i] for i in range(len(chunks))]
        if self.capacity:
            sequences = packed(chunks["length"].to_numpy(), self.capacity, count, is_last)
        if not is_last:
            self._left[number] = chunks.take(pa.array(chain.from_iterable(sequences[count:]), pa.int64()))
        rows = as_chunks(chunks)
        return [[rows[i] for i in sequences[place]] for place in random.permutation(count)]

    def _left_of(self, number: int) -> pa.Table:
        """Return what is left over of a window; after a resume, it may have to be read again."""
        if future := self._read.get(number):
            future.result()
        if number not in self._left:
            self.read_window(number)
        return self._left[number]


def as_chunks(table: pa.Table) -> list[Chunk]:
    """Return the rows of a table, with lists as arrays. `datasets` would take 43 us for each, three times as long."""
    columns = (
        [value.values.to_numpy() for value in column] if pa.types.is_list(column.type) else column.to_pylist()
        for column in table.columns
    )
    return [dict(zip(table.column_names, row, strict=True)) for row in zip(*columns, strict=True)]


def packed(lengths: np.ndarray, capacity: int, count: int, is_last: bool) -> list[list[int]]:
    """Return the chunks in each of `count` sequences, and then those of sequences that are left over; none if the
    window `is_last`, whose sequences are longer if they have to be. If there are too few, the rest are empty."""
    size = max(capacity, math.ceil(lengths.sum() / max(count, 1))) if is_last else capacity
    while len(sequences := best_fit(lengths, size)) > count and is_last:
        size = math.ceil(size * WIDENING)
    # the fullest first
    return sorted(sequences, key=lambda sequence: -lengths[sequence].sum()) + [[]] * (count - len(sequences))


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
