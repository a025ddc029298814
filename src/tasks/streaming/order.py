"""The order of an epoch's rows, and how many sequences they make: functions of the seed and the epoch alone.

Rows come in blocks. All blocks of an epoch are put into one order, which is cut into windows; the rows of a window are
shuffled and packed together. This must hold:

- An epoch has each row of a source as often as its passes say, whichever process reads it.
- Any stretch of the order has rows from all parts of a source, even if it is sorted, and from each source of a mixture
  in proportion to its weight. Once a source is used up, the others divide up the rest.
- The blocks of a group follow each other: a row group of a .parquet file is decoded once.
- How many sequences a window has is known before any row of the epoch is read: so sequence k is in window n, whatever
  was read before. Little of them is padding.

A window's tokens are forecast from its bytes. It makes as many sequences as they fill for certain, and leaves the rest
to the last window of its span. So only the total of a span has to be forecast well.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from src.tasks.streaming.index import Source

ROUNDING = 1e-6
"""Added before rounding down, as shares are fractions."""


def spread(size: int, random: np.random.Generator) -> np.ndarray:
    """Return 0 to `size` - 1 in a random order whose stretches of √size have one from each of √size equal parts; shape
    (size,), int64."""
    side = math.isqrt(size - 1) + 1
    parts = random.permuted(np.arange(side**2).reshape(side, side), axis=1)
    order = random.permuted(parts.T, axis=1).ravel()
    return order[order < size]


def shuffled(group_of: np.ndarray, random: np.random.Generator) -> np.ndarray:
    """Return the numbers of a source's blocks, shuffled: its groups, and the blocks of each. `group_of` has the group
    of each block, those of a group next to each other; both have shape (blocks,), int64."""
    groups = np.split(np.arange(len(group_of)), np.flatnonzero(np.diff(group_of)) + 1)
    return np.concatenate([groups[i][spread(len(groups[i]), random)] for i in spread(len(groups), random)])


class Cut(NamedTuple):
    """Says how epochs are cut into windows, and how many sequences these make."""

    windows: int
    """In an epoch, about."""
    sequences: int
    """In an epoch."""
    span: int = 1
    """Windows of which the last takes what the others leave over."""
    filled: float = 1.0
    """Fraction of the sequences of its tokens that a window makes, unless it is the last of its span."""


class Epoch(NamedTuple):
    """Holds the blocks of an epoch in their order, cut into windows."""

    sources: np.ndarray
    """The source of each block; shape (blocks,), int64."""
    blocks: np.ndarray
    """The number of each block in its source; shape (blocks,), int64."""
    windows: np.ndarray
    """The first block of each window, and the number of blocks; shape (windows + 1,), int64."""
    sequences: np.ndarray
    """The first sequence of each window, and the number of sequences; shape (windows + 1,), int64."""


def order_epoch(sources: Sequence[Source], cut: Cut, seed: int, number: int) -> Epoch:
    """Return the order of an epoch, counted from 0."""
    orders, times, tokens = [], [], []
    for i, source in enumerate(sources):
        passes = range(number * source.passes, (number + 1) * source.passes)
        order = np.concatenate([shuffled(source.groups, np.random.default_rng([seed, 0, i, n])) for n in passes])
        orders.append(order)
        times.append(np.cumsum(source.rows[order]) / source.weight)
        tokens.append(source.tokens[order])
    merged = np.argsort(np.concatenate(times), kind="stable")
    source_of = np.repeat(np.arange(len(orders)), [*map(len, orders)])[merged]
    before = np.cumsum(np.append(0, np.concatenate(tokens)[merged]))
    share = before / before[-1]
    window_of = np.minimum(share[:-1] * cut.windows, cut.windows - 1) // 1
    windows = np.append(np.flatnonzero(np.diff(window_of, prepend=-1)), len(merged))
    share = share[windows]
    places = np.arange(len(share))
    of_span = share[places - places % cut.span]
    filled = of_span + cut.filled * (share - of_span)
    filled[-1] = 1  # the last window takes what is left
    sequences = np.floor(filled * cut.sequences + ROUNDING).astype(np.int64)
    return Epoch(source_of, np.concatenate(orders)[merged], windows, sequences)
