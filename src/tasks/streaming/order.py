"""The order of a mixture's rows: a pure function of seed and epoch, whichever process reads them.

The groups of each source are shuffled, and the blocks of a group, so that each window has rows from all parts of a
source, even if it is sorted; then the rows within windows. A window takes its share from each source until
the source is used up; the others then divide up the rest. Shares are in rows of mean size: fewer rows are taken where
they are long, so that all windows of all epochs make about the same number of tokens.
"""

from dataclasses import dataclass
from functools import cached_property, lru_cache

import numpy as np

from src.tasks.text.reading import BLOCK


def ranges(firsts: np.ndarray, sizes: np.ndarray) -> np.ndarray:
    """Return the numbers of ranges, one range after the other, given the first of each and how many it has; int64."""
    ends = np.cumsum(sizes)
    return np.arange(sizes.sum()) + np.repeat(firsts - ends + sizes, sizes)


def evenly(places: np.ndarray, sizes: np.ndarray, random: np.random.Generator) -> np.ndarray:
    """Return keys that sort `places`, each one of 0 to `sizes` - 1, into a random order of which each stretch is spread
    evenly over all of them; int64.

    Source: the van der Corput sequence, scrambled as in Owen 1995, "Randomly permuted (t,m,s)-nets": neighbours in the
    order come from the two halves, those of a half from its halves, and so on; which one is first is random.
    """
    levels = int(sizes.max(initial=1)).bit_length()
    places = (places << levels) // sizes
    keys = np.zeros_like(places)
    for level in range(levels):
        swaps = random.integers(0, 2, 1 << level)
        keys |= ((places >> (levels - level - 1) & 1) ^ swaps[places >> (levels - level)]) << level
    return keys


@dataclass(frozen=True, eq=False)
class Order:
    """Tells which rows of which sources make up each window."""

    groups: list[np.ndarray]
    """For each source, the number of rows in each of its groups; int64."""
    masses: list[np.ndarray]
    """The weight of each of these groups, in rows of mean size; they sum to the number of rows; float64."""
    weights: list[float]
    passes: list[int]
    """How many times an epoch has each row of a source."""
    window: int
    """Rows of mean size in a window; an epoch's last one may be smaller."""

    @cached_property
    def totals(self) -> np.ndarray:
        """Return how many rows an epoch has from each source; int64."""
        return np.array([rows.sum() for rows in self.groups]) * np.array(self.passes)

    @cached_property
    def shares(self) -> np.ndarray:
        """Return how many rows of mean size each window of an epoch takes from each source; shape (windows, sources),
        int64."""
        taken, left, owed = [], self.totals.copy(), np.zeros(len(self.totals))
        while left.any():
            size = min(self.window, int(left.sum()))
            weights = np.where(left > 0, self.weights, 0.0)
            # what a source is owed after rounding to whole rows is made up for in the next window
            owed = np.where(left > 0, owed, 0.0) + size * weights / weights.sum()
            rows = np.clip(np.floor(owed), 0, left).astype(np.int64)
            while rows.sum() < size:
                rows[np.argmax(np.where(rows < left, owed - rows, -np.inf))] += 1
            taken.append(rows)
            owed, left = owed - rows, left - rows
        return np.array(taken)

    def rows(self, seed: int, epoch: int, window: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the rows of a window, shuffled: the source of each, and its number there; of shape (rows,), int64."""
        share = self.shares[window]
        firsts = epoch * self.totals + self.shares[:window].sum(axis=0)
        numbers = [
            self._numbers(seed, source, first, first + size)
            for source, (first, size) in enumerate(zip(firsts.tolist(), share.tolist(), strict=True))
        ]
        sizes = [len(part) for part in numbers]
        shuffled = np.random.default_rng([seed, 1, epoch, window]).permutation(sum(sizes))
        return np.repeat(np.arange(len(sizes)), sizes)[shuffled], np.concatenate(numbers)[shuffled]

    def _numbers(self, seed: int, source: int, first: int, last: int) -> np.ndarray:
        """Return the rows of a source from place `first` up to `last`, counted in rows of mean size over all passes."""
        size = int(self.groups[source].sum())
        parts = [np.empty(0, np.int64)]
        while first < last:
            number, place = divmod(first, size)
            end = min(size, place + last - first)
            ends, shifts, masses = self.shuffled(seed, source, number)
            # the same number ends one window and begins the next: no row is lost or repeated
            start, stop = np.rint(np.interp([place, end], masses, np.append(0, ends))).astype(int)
            rows = np.arange(start, stop)
            parts.append(rows + shifts[np.searchsorted(ends, rows, side="right")])
            first += end - place
        return np.concatenate(parts)

    @lru_cache(maxsize=8)  # noqa: B019  # a run has one Order
    def shuffled(self, seed: int, source: int, number: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return where the blocks of a source end, in their order in pass `number`; what to add to a row's place in
        that order to get its number; and the cumulative masses up to these ends, from 0 on."""
        groups, random = self.groups[source], np.random.default_rng([seed, 0, source, number])
        blocks = -(-groups // BLOCK)
        group, block = np.repeat(np.arange(len(groups)), blocks), ranges(np.zeros_like(blocks), blocks)
        ranks = evenly(np.arange(len(groups)), np.full(len(groups), len(groups)), random)
        # a group is read once, if it is large: its blocks stay together
        order = np.lexsort([evenly(block, blocks[group], random), ranks[group]])
        firsts = np.cumsum(groups)[group] - groups[group] + block * BLOCK
        sizes = np.minimum(groups[group] - block * BLOCK, BLOCK)
        ends = np.cumsum(sizes[order])
        masses = np.cumsum((self.masses[source][group] * sizes / groups[group])[order])
        masses[-1] = ends[-1]  # whatever rounding made of it
        return ends, (firsts + sizes)[order] - ends, np.append(0, masses)
