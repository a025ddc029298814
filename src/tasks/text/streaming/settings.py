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
from src.tasks.text.files import LOADERS, by_split
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
        self._source_names = unique_names([source.dataset for source in self.sources])
        mixed = self.sources or [MixtureSource()]
        opened = [
            part.open_shards(source) if self.streaming else part.open_table(source)
            for part, source in zip(self._parts(), mixed, strict=True)
        ]
        return Mixture(source for source, _ in opened), [rows for _, rows in opened]

    def open_table(self, mixed: MixtureSource) -> tuple[Source, Dataset]:
        """Return the rows to train on, those of a map-style table, and the rows to evaluate on."""
        train, evaluation = TextSource.load_rows(self)
        if evaluation is None:
            train, evaluation = TextSource.split(self, train)
        groups = [min(BLOCK, len(train) - first) for first in range(0, len(train), BLOCK)]
        reader = TableReader(train, self.dataset)
        return Source(mixed.weight, mixed.max_epochs, reader, np.array(groups), train.column_names), evaluation

    def open_shards(self, mixed: MixtureSource) -> tuple[Source, Dataset]:
        """Return what `open_table` does, the rows to train on being streamed."""
        splits = self._find_splits()
        shards, *evaluation = [self._index(splits[split]) for split in self.used_splits([*splits])]
        columns = shards[0].columns
        lacking = [(shard.url, [name for name in columns if name not in shard.columns]) for shard in shards]
        refuse(f"{url}: no column {' nor '.join(names)}, as other shards have" for url, names in lacking if names)
        reader = ShardReader(shards)
        groups = np.array([rows for _, rows, *_ in reader.groups])
        source = Source(mixed.weight, mixed.max_epochs, reader, groups, columns)
        return source, self._load_shards(evaluation[0]) if evaluation else self._hold_out(source)

    def _hold_out(self, source: Source) -> Dataset:
        """Take the rows to evaluate on from the end of the last group, and return them."""
        size = min(HELD_OUT, self.held_out(int(source.groups.sum())), int(source.groups[-1]))
        source.groups[-1] -= size
        group, first = len(source.groups) - 1, int(source.groups[-1])
        rows, unreadable = source.reader.read(group, first, first + size, tuple(source.columns))
        if not self.skip_bad_rows:
            refuse(f"{source.reader.name(group, first + place)}: {why}" for place, why in unreadable.items())
        good = [place for place in range(size) if place not in unreadable]
        with explained(f"task.dataset={self.dataset}: its last {size} rows are no table to evaluate on, "):
            return Dataset.from_dict({name: [values[i] for i in good] for name, values in rows.items()})

    def _load_shards(self, shards: list[Shard]) -> Dataset:
        files = [glob.escape(shard.url) for shard in shards]
        # else the cache of datasets goes by path and time alone
        content = Hasher.hash([(shard.version, shard.digest) for shard in shards])
        with loading("dataset", self.dataset):
            return load_dataset(LOADERS[Path(files[0]).suffix.lower()], content, data_files=files, split="train")

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
