"""How rows are streamed and mixed: what the settings make of the data."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from datasets.fingerprint import Hasher
from pydantic import PositiveFloat, PositiveInt

from src.config.errors import refuse
from src.config.settings import ResumeSafe
from src.tasks.text.files import KINDS, Splits
from src.tasks.text.readers import Part, Source, TableReader
from src.tasks.text.source import CODE, TextSource, cache_folder
from src.tasks.text.streaming.blocks import Blocks, Maker, Mixture
from src.tasks.text.streaming.order import Order
from src.tasks.text.streaming.sources import BySource, MixtureSource
from src.tasks.text.streaming.stream import Stream, count_sequences
from src.tasks.text.values import Encoders

HELD_OUT = 1000
"""Rows at the end of streamed data that are evaluated on at most, if no file is named for that."""


class Streaming(BySource):
    """Settings of streamed data and of mixtures, and what they make of the data."""

    shuffle_window: PositiveInt = 10_000
    """Streamed or mixed rows that are shuffled and packed together, on average: windows are alike in bytes. Groups of
    rows are shuffled before."""
    cache_gb: ResumeSafe[PositiveFloat] = 20.0
    """Gigabytes that tokenized rows may take on the disk, for the next epoch and other processes."""

    def source_errors(self) -> Iterator[str]:
        if self.sources and self.dataset and self.is_streamed:
            yield "task.dataset and task.sources: set one, a dataset or those to mix"
        for source in self.sources:
            if not source.weight:
                yield f"task.sources: {source.dataset} has a weight of 0: leave it out, or give it a share"
        for part in self._parts():
            is_found = "://" in part.dataset or (part.dataset and Path(part.dataset).exists())  # find_shards judges it
            if not (self.streaming and self.is_streamed and is_found):
                yield from super(Streaming, part).source_errors()

    def _parts(self) -> list["Streaming"]:
        """Return the settings of each source by itself."""
        if not self.sources or not self.is_streamed:
            return [self]
        return [
            self.model_copy(update={"dataset": source.dataset, "dataset_config": source.dataset_config})
            for source in self.sources
        ]

    def open_rows(self) -> tuple[Any, Any]:
        if not self.is_streamed:
            return super().open_rows()
        stems = [Path(source.dataset).stem for source in self.sources]
        self._source_names = [
            stem if stems.count(stem) == 1 else f"{stem}_{number}" for number, stem in enumerate(stems, start=1)
        ]
        opened = [TextSource.open_rows(part) for part in self._parts()]
        return Mixture(source for source, _ in opened), [evaluation for _, evaluation in opened]

    def fetched(self, files: Splits) -> Any:
        return files if self.streaming else super().fetched(files)

    def tables_of_hub(self, others: list[str]) -> Any:
        if self.streaming:
            refuse(f"{name}: cannot be streamed, only {', '.join(KINDS[1:])} files" for name in others)
        return super().tables_of_hub(others)

    def usable_parts(self, train: Any, evaluation: Any, columns: Encoders) -> tuple[Any, Any]:
        if not self.is_streamed:
            return super().usable_parts(train, evaluation, columns)
        usable = []
        for place, (part, source, rows) in enumerate(zip(self._parts(), train, evaluation, strict=True)):
            if self.streaming:
                part.require_columns(columns, source)
                held_out = part.hold_out(source) if rows is None else None
                usable.append(part.usable_rows(rows or source, columns, "eval", held_out))
            else:
                loaded, evaluated = TextSource.usable_parts(part, source, rows, columns)
                train[place] = TableReader(loaded, part.dataset)
                usable.append(evaluated)
        return train, usable

    def hold_out(self, source: Source) -> list[Part]:
        """Take the end of the last group from the rows to train on; return it."""
        size = min(HELD_OUT, self.held_out(int(source.sizes.sum())), int(source.sizes[-1]))
        source.sizes[-1] -= size
        first = int(source.sizes[-1])
        return [(len(source.sizes) - 1, first, first + size)]

    def stream(self, sources: Mixture, columns: Encoders, maker: Maker, capacity: int | None) -> Stream:
        """Return the training set: sequences of up to `capacity` tokens, or of one chunk each if that is None. The
        other arguments are those of Blocks."""
        skips = self.bad_rows == "skip"
        key = Hasher.hash([columns, maker, skips, CODE])
        blocks = Blocks(columns, maker, skips, key, cache_folder() / "blocks", int(self.cache_gb * 1e9))
        mixed = self.sources or [MixtureSource()]
        weights, passes = [source.weight for source in mixed], [source.max_epochs for source in mixed]
        groups = [source.sizes for source in sources]
        # where each row is a sequence, windows are cut by rows
        masses = [masses_of(source) for source in sources] if capacity else groups
        order = Order(groups, masses, weights, passes, self.shuffle_window)
        return Stream(order, sources, blocks, capacity, count_sequences(order, sources, blocks, capacity))


def masses_of(source: Source) -> np.ndarray:
    """Return what each group of a source counts for by its bytes, in rows of mean size; float64."""
    sizes = source.sizes * source.row_bytes
    return sizes * (source.sizes.sum() / sizes.sum())
