"""How many tokens the rows of a stream have, and how many sequences they fill: forecasts from bytes and a sample."""

import math
from collections.abc import Sequence

import numpy as np

from src.config.errors import UserError
from src.tasks.streaming.cache import TokenCache
from src.tasks.streaming.index import Source
from src.tasks.text.packing import best_fit

MIN_SAMPLE, MAX_SAMPLE = 8192, 65_536
"""Rows of a source that are sampled: as many as the first, and then more, until two standard errors are within
PRECISION, or they are as many as the second."""
PRECISION = 0.004
"""Fraction of padding that the error of a forecast may cause."""
MARGIN = 1.006
"""What the forecast of an epoch's sequences is multiplied by: windows that are packed apart are less full, and spans
differ."""
FULL = 0.97
"""Fraction of the tokens of the best packed sequences that a full one has."""
SAFETY = 0.9
"""Fraction of the full sequences of the poorest part of a sample that any window has."""


def forecast(sources: Sequence[Source], cache: TokenCache, capacity: int, window: int) -> tuple[int, float]:
    """Forecast the tokens of each block of the sources, and set them there. Return how many sequences hold those of an
    epoch with high probability; and the fraction of the sequences of its tokens that a window, of so many rows, fills
    for certain: a constant in place of that fails for sorted rows. Raise a UserError if no row in a sample can be
    used."""
    samples = [sample(source, cache) for source in sources]
    pooled = np.concatenate([lengths for found, *_ in samples for lengths in found])
    if not pooled.any():
        raise UserError("no row in a sample of the training data can be used: is this the right column?")
    # tokens in a sequence of best-fit packing; the last one is half full on average
    full = min(capacity, pooled.sum() / (len(best_fit(pooled, capacity)) - 0.5))
    most, filled = 0.0, []
    for source, (found, chosen, mean, error) in zip(sources, samples, strict=True):
        source.tokens = source.sizes * mean
        most += source.sizes.sum() * source.passes * (mean + 2 * error)
        # neighbours in a sample are alike if the source is sorted: no window is poorer than they are
        parts = min(len(found), max(2, source.rows[chosen].sum() // window))
        for part in np.array_split(np.arange(len(found)), parts):
            lengths = np.concatenate([found[i] for i in part])
            tokens = np.array([lengths[sequence].sum() for sequence in best_fit(lengths, capacity)])
            filled.append((tokens >= FULL * full).sum() * full / source.tokens[chosen[part]].sum())
    return math.ceil(most / full * MARGIN), SAFETY * min(1.0, *filled)


def sample(source: Source, cache: TokenCache) -> tuple[list[np.ndarray], np.ndarray, float, float]:
    """Sample blocks of a source, in their order. Return the lengths of their chunks; their numbers; the tokens per
    byte; and the standard error of these."""
    number, random = len(source.rows), np.random.default_rng(0)
    count = MIN_SAMPLE * number // source.rows.sum() + 1
    while True:
        count = min(count, number)
        # one from each of equal parts
        chosen = ((np.arange(count) + random.random(count)) * number / count).astype(int)
        found = [cache.read(source[i])["length"].to_numpy() for i in chosen.tolist()]
        tokens, sizes = np.array([lengths.sum() for lengths in found]), source.sizes[chosen]
        mean = tokens.sum() / sizes.sum()
        # from the differences of neighbours, which are alike if the source is sorted; none if it is all sampled
        off = np.diff(tokens - mean * sizes)
        error = np.sqrt(np.sum(off**2) / 2 * (1 - count / number)) / sizes.sum()
        if 2 * error <= PRECISION * mean or count == number or source.rows[chosen].sum() >= MAX_SAMPLE:
            return found, chosen, mean, error
        count *= 2
