"""How rows are streamed and mixed: what the settings make of the data."""

import glob
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import datasets
import numpy as np
from datasets import Dataset, load_dataset, load_dataset_builder
from datasets.fingerprint import Hasher
from pydantic import PositiveFloat, PositiveInt

from src.config.errors import UserError, explained, refuse
from src.config.settings import ResumeSafe
from src.tasks.text.files import EVALUATION, LOADERS, by_split
from src.tasks.text.hub import loading
from src.tasks.text.packing import Chunk
from src.tasks.text.source import CODE, ColumnKind, TextSource
from src.tasks.text.streaming.blocks import BLOCK, Blocks, Mixture, Source, TableReader
from src.tasks.text.streaming.order import Order
from src.tasks.text.streaming.shards import Rows, Shard, ShardReader, find_shards, index_shards
from src.tasks.text.streaming.sources import BySource, MixtureSource
from src.tasks.text.streaming.stream import Stream, count_sequences

HELD_OUT = 1000
"""Rows at the end of streamed data that are evaluated on at most, if no file is named for that."""


class Streaming(BySource):
    """Settings of streamed data and of mixtures, and what they make of the data."""

    shuffle_window: PositiveInt = 10_000
    """Streamed or mixed rows that are shuffled and packed together. Groups of rows are shuffled before."""
    cache_gb: ResumeSafe[PositiveFloat] = 20.0
    """Gigabytes that tokenized rows may take on the disk, for the next epoch and other processes."""
    skip_bad_rows: bool = False
    """Leave out streamed rows that cannot be used, and count them in train/skipped_rows."""

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

    def load_rows(self) -> tuple[Any, Any]:
        if not self.is_streamed:
            return super().load_rows()
        datasets.disable_progress_bars()  # they would stay when they are done
        parts, mixed = self._parts(), self.sources or [MixtureSource()]
        self._source_names = unique_names([source.dataset for source in self.sources])
        opened = [part.open_shards() if self.streaming else part.open_table() for part in parts]
        sources = Mixture(
            Source(source.weight, source.max_epochs, reader, np.array(groups), columns)
            for source, (reader, groups, columns, _) in zip(mixed, opened, strict=True)
        )
        return sources, [rows for *_, rows in opened]

    def open_table(self) -> tuple[Any, list[int], list[str], Dataset]:
        """Return what reads the rows to train on from a map-style table, the rows of each group, the columns, and the
        rows to evaluate on."""
        train, evaluation = TextSource.load_rows(self)
        if evaluation is None:
            train, evaluation = TextSource.split(self, train)
        groups = [min(BLOCK, len(train) - first) for first in range(0, len(train), BLOCK)]
        return TableReader(train, self.dataset), groups, train.column_names, evaluation

    def open_shards(self) -> tuple[Any, list[int], list[str], Dataset]:
        """Return what `open_table` does, the rows to train on being streamed."""
        splits = self._find_splits()
        eval_split = self.eval_split or next((name for name in EVALUATION if name in splits), None)
        for split in filter(None, (self.train_split, eval_split)):
            if split not in splits:
                raise UserError(f"task.dataset={self.dataset}: no split {split}, it has {', '.join(splits)}")
        shards = self._index(splits[self.train_split])
        columns = shards[0].columns
        lacking = [(shard.url, [name for name in columns if name not in shard.columns]) for shard in shards]
        refuse(f"{url}: no column {' nor '.join(names)}, as other shards have" for url, names in lacking if names)
        reader = ShardReader(shards)
        groups = [rows for _, rows, *_ in reader.groups]
        if eval_split:
            files = [glob.escape(shard.url) for shard in self._index(splits[eval_split])]
            with loading("dataset", self.dataset):
                kind = LOADERS[Path(files[0]).suffix.lower()]
                return reader, groups, columns, load_dataset(kind, data_files=files, split="train")
        # the end of the last group
        size = min(HELD_OUT, round(sum(groups) * self.eval_fraction), groups[-1])
        if not 0 < size < sum(groups):
            says = f"{sum(groups)} rows are too few to keep {self.eval_fraction:g} of them for evaluation"
            raise UserError(f"task.dataset={self.dataset}: {says} (task.eval_fraction)")
        groups[-1] -= size
        last = len(groups) - 1
        rows, unreadable = reader.read(last, groups[-1], groups[-1] + size, tuple(columns))
        if not self.skip_bad_rows:
            refuse(f"{reader.name(last, groups[-1] + place)}: {why}" for place, why in unreadable.items())
        good = [place for place in range(size) if place not in unreadable]
        with explained(f"task.dataset={self.dataset}: its last {size} rows are no table to evaluate on, "):
            return reader, groups, columns, Dataset.from_dict({n: [v[i] for i in good] for n, v in rows.items()})

    @property
    def _cache(self) -> Path:
        return Path(datasets.config.HF_DATASETS_CACHE) / "streaming"

    def _index(self, files: dict[str, str]) -> list[Shard]:
        """Return the index of those files that have a row. Raise a UserError if there are none."""
        shards = [shard for shard in index_shards(files, self._cache) if shard.groups]
        if not shards:
            raise UserError(f"task.dataset={self.dataset}: no row in its {len(files)} files")
        return shards

    def _find_splits(self) -> dict[str, dict[str, str]]:
        """Return the shards of each split, each with its version."""
        if "://" in self.dataset or Path(self.dataset).exists():
            found = find_shards(self.dataset)
            return {split: {url: found[url] for url in urls} for split, urls in by_split(found).items()}
        with loading("dataset", self.dataset):
            files = load_dataset_builder(self.dataset, self.dataset_config).config.data_files or {}
        folders = {name.rpartition("/")[0] for names in files.values() for name in names}
        found = {url: version for folder in folders for url, version in find_shards(folder).items()}
        return {split: {name: found[name] for name in names} for split, names in files.items()}

    def usable_parts(self, train: Any, evaluation: Any, columns: dict[str, ColumnKind]) -> tuple[Any, Any]:
        if not self.is_streamed:
            return super().usable_parts(train, evaluation, columns)
        for part, source in zip(self._parts(), train, strict=True):
            if missing := " nor ".join(name for name in columns if name not in source.columns):
                names = ", ".join(source.columns)
                raise UserError(f"task.dataset={part.dataset}: no column {missing}; its columns are {names}")
        usable = []
        for part, rows in zip(self._parts(), evaluation, strict=True):
            options = {"bad_rows": "skip"} if self.skip_bad_rows else {}
            usable.append(part.model_copy(update=options)._validate_rows(rows, "eval", columns))
        return train, usable

    def stream(
        self,
        sources: Mixture,
        columns: dict[str, Callable[[Any], str | None]],
        chunks_by_row: Callable[[Rows], list[list[Chunk]]],
        filler: Chunk,
        capacity: int | None,
    ) -> Stream:
        """Return the training set: sequences of up to `capacity` tokens, or of one chunk each if that is None. The
        other arguments are those of Blocks."""
        key = Hasher.hash([chunks_by_row, columns, CODE, self.skip_bad_rows])
        limit = int(self.cache_gb * 1e9)
        blocks = Blocks(columns, chunks_by_row, filler, self.skip_bad_rows, key, self._cache / "blocks", limit)
        weights, passes = [source.weight for source in sources], [source.passes for source in sources]
        order = Order([source.groups for source in sources], weights, passes, self.shuffle_window)
        counts = count_sequences(order.shares, sources, blocks, capacity)
        return Stream(order, sources, blocks, capacity, counts)


def unique_names(names: list[str]) -> list[str]:
    """Return a name for each dataset: the last part of its path, and a number where that is not the only one."""
    stems = [Path(name).stem for name in names]
    return [stem if stems.count(stem) == 1 else f"{stem}_{number}" for number, stem in enumerate(stems, start=1)]
