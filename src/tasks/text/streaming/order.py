"""The order of a mixture's rows: a pure function of seed and epoch, whichever process reads them.

The groups of each source are shuffled, then the rows within windows. A window takes its share from each source until
the source is used up; the others then divide up the rest. Shares are in rows of mean size: fewer rows are taken where
they are long, so that all windows of all epochs make about the same number of tokens.
"""

from dataclasses import dataclass
from functools import cached_property, lru_cache

import numpy as np

HELD_OUT = 1000
"""Maximum number of rows held out from the end of streamed data for evaluation, if it has no split for that."""


def hold_out(sizes: np.ndarray, wanted: int) -> list[tuple[int, int, int]]:
    """Take up to `wanted` rows off the end of the last group of these sizes, in place. Return their range: the group,
    its first row, and the row after its last."""
    size = min(HELD_OUT, wanted, int(sizes[-1]))
    sizes[-1] -= size
    first = int(sizes[-1])
    return [(len(sizes) - 1, first, first + size)]


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
            ends, shifts, masses = self._shuffled(seed, source, number)
            # the same number ends one window and begins the next: no row is lost or repeated
            start, stop = np.rint(np.interp([place, end], masses, np.append(0, ends))).astype(int)
            rows = np.arange(start, stop)
            parts.append(rows + shifts[np.searchsorted(ends, rows, side="right")])
            first += end - place
        return np.concatenate(parts)

    @lru_cache(maxsize=8)  # noqa: B019  # a run has one Order
    def _shuffled(self, seed: int, source: int, number: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return where the groups of a source end, in their order in pass `number`; what to add to a row's place in
        that order to get its number; and the cumulative masses up to these ends, from 0 on."""
        groups = self.groups[source]
        order = np.random.default_rng([seed, 0, source, number]).permutation(len(groups))
        ends = np.cumsum(groups[order])
        masses = np.cumsum(self.masses[source][order])
        masses[-1] = ends[-1]  # whatever rounding made of it
        return ends, np.cumsum(groups)[order] - ends, np.append(0, masses)
