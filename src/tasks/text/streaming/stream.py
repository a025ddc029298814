"""A training set of which only a window is in memory: its rows are tokenized and packed when it is their turn."""

import hashlib
import math
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from threading import Thread

import numpy as np

from src.config.errors import UserError
from src.tasks.text.packing import Chunk, best_fit
from src.tasks.text.streaming.blocks import Blocks, Source
from src.tasks.text.streaming.order import Order

Window = list[list[Chunk]]
"""The chunks of each sequence; none where it is all padding."""
PLACES, SAMPLED = 4, 2048
"""Places in each source, evenly spread, and rows at each, that tell how long rows are."""
WIDENING = 1.02
"""Factor by which sequences become longer until a window's chunks fit into them."""


@dataclass(frozen=True, eq=False)
class Stream:
    """The sequences of an epoch, of one or more chunks each: a map-style dataset, to be read in ascending order.

    How many sequences a window's rows make is settled before they are read: it follows from the index and a sample. So
    a sequence's number tells its window, whatever was read before.
    """

    order: Order
    sources: list[Source]
    blocks: Blocks
    capacity: int | None
    """Tokens of a sequence, as far as possible; None: each is one chunk, and each row has one."""
    counts: np.ndarray
    """Sequences of each window, as `count_sequences` returns them."""
    seed: int = 0
    epoch: int = 0
    _read: dict[int, Future[Window]] = field(default_factory=dict, init=False)
    """Windows that are being read or have been, by number."""

    def __len__(self) -> int:
        return int(self.counts.sum())

    def __getitems__(self, indices: list[int]) -> list[list[Chunk]]:
        ends = np.cumsum(self.counts)
        windows = np.searchsorted(ends, indices, side="right")
        places = indices - (ends - self.counts)[windows]
        return [self._window(window)[place] for window, place in zip(windows.tolist(), places.tolist(), strict=True)]

    def describe(self, _sequence_length: int) -> dict[str, float]:
        """Return what is known before the rows are read."""
        return {"sequences": len(self), "rows": int(self.order.totals.sum()), "windows": len(self.counts)}

    def fingerprint(self) -> str:
        """Return what changes with the rows, their order, or the sequences that they make."""
        parts = [*(source.reader.fingerprint for source in self.sources), self.blocks.key, self.capacity]
        arrays = [*self.order.groups, self.order.shares, self.counts]
        return hashlib.sha256(str(parts).encode() + b"".join(array.tobytes() for array in arrays)).hexdigest()

    def _window(self, number: int) -> Window:
        """Return a window, and begin to read the one after it."""
        near = [number, number + 1] if number + 1 < len(self.counts) else [number]
        for other in self._read.keys() - {*near}:
            del self._read[other]
        for window in near:
            if window not in self._read:
                self._read[window] = in_thread(partial(self.read_window, window))
        return self._read[number].result()

    def read_window(self, number: int) -> Window:
        """Return the sequences of a window, shuffled."""
        sources, rows = self.order.rows(self.seed, self.epoch, number)
        of_source = [self.blocks.read(source, rows[sources == i]) for i, source in enumerate(self.sources)]
        chunks = [chunk | {"source": i} for i in sources.tolist() for chunk in next(of_source[i])]
        count = int(self.counts[number])
        sequences = [[i] for i in range(count)]
        if self.capacity:
            sequences = packed([len(chunk["input_ids"]) for chunk in chunks], self.capacity, count)
        shuffled = np.random.default_rng([self.seed, 2, self.epoch, number]).permutation(count)
        return [[chunks[i] for i in sequences[place]] for place in shuffled]


def count_sequences(shares: np.ndarray, sources: list[Source], blocks: Blocks, capacity: int | None) -> np.ndarray:
    """Return how many sequences each window makes; shape (windows,), int64.

    If `capacity` is None, one for each row. Else as many as hold the tokens of its rows, except in one window of
    about fifty: the mean in a sample, and twice the standard deviation of what a window differs from that by. `shares`
    are those of the Order.
    """
    if capacity is None:
        return shares.sum(axis=1)
    means, variances, sampled, lengths = [], [], [], []
    for source in sources:
        starts = np.linspace(0, source.groups.sum(), PLACES, endpoint=False).astype(int)
        rows = np.unique(np.minimum(starts[:, None] + np.arange(SAMPLED), source.groups.sum() - 1))
        by_row = [[len(chunk["input_ids"]) for chunk in chunks] for chunks in blocks.read(source, rows)]
        sums = [sum(row) for row in by_row]
        means.append(np.mean(sums))
        variances.append(np.var(sums))
        sampled.append(len(sums))
        lengths += [length for row in by_row for length in row]
    if not any(lengths):
        raise UserError("no row of a sample of the data to train on can be used: is it the column that you mean?")
    # what best-fit packing leaves empty; its last sequence is half full on average
    efficiency = min(1.0, sum(lengths) / ((len(best_fit(np.array(lengths), capacity)) - 0.5) * capacity))
    # that of a window's sum, and that of the sample's mean, which all of its rows share
    variance = shares @ np.array(variances) + shares**2 @ (np.array(variances) / sampled)
    tokens = shares @ np.array(means) + 2 * np.sqrt(variance)
    return np.maximum(1, np.ceil(tokens / (efficiency * capacity))).astype(np.int64)


def packed(lengths: list[int], capacity: int, count: int) -> list[list[int]]:
    """Return the chunks in each of `count` sequences. If those of `capacity` tokens would be more, they are longer; if
    they are fewer, the rest are empty."""
    size = max(capacity, math.ceil(sum(lengths) / count))
    while len(sequences := best_fit(np.array(lengths), size)) > count:
        size = math.ceil(size * WIDENING)
    return sequences + [[] for _ in range(count - len(sequences))]


def in_thread(read: Callable[[], Window]) -> Future[Window]:
    """Begin to read in a thread. It is no daemon: stopped in the midst of a read, Arrow crashes the interpreter. Nor is
    it a ThreadPoolExecutor's: these are waited for before `main_thread` counts as ended, which is what stops a read."""
    future: Future[Window] = Future()

    def run() -> None:
        try:
            future.set_result(read())
        except BaseException as error:
            future.set_exception(error)

    Thread(target=run).start()
    return future
