"""How rows are streamed and mixed: what the settings make of the data."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import datasets
import numpy as np
from datasets import Dataset, load_dataset_builder
from datasets.fingerprint import Hasher
from pydantic import PositiveFloat, PositiveInt

from src.config.errors import UserError, explained, refuse
from src.config.settings import ResumeSafe
from src.config.terminal import bar
from src.tasks.text.files import by_split
from src.tasks.text.hub import loading
from src.tasks.text.source import CODE, PART_NAMES, ColumnKind, TextSource, complaint
from src.tasks.text.streaming.blocks import Blocks, Mixture, Part, Source, TableReader, usable_rows
from src.tasks.text.streaming.labelling import Maker
from src.tasks.text.streaming.order import Order
from src.tasks.text.streaming.shards import SUFFIXES, Rows, ShardReader, find_shards, index_shards
from src.tasks.text.streaming.sources import BySource, MixtureSource
from src.tasks.text.streaming.stream import Stream, count_sequences

HELD_OUT = 1000
"""Rows at the end of streamed data that are evaluated on at most, if no file is named for that."""
Parts = tuple[ShardReader, list[Part]]
"""Rows to evaluate on, not read yet."""


class Streaming(BySource):
    """Settings of streamed data and of mixtures, and what they make of the data."""

    shuffle_window: PositiveInt = 10_000
    """Streamed or mixed rows that are shuffled and packed together, on average: windows are alike in bytes. Groups of
    rows are shuffled before."""
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
        opened = [part.open_shards() if self.streaming else part.open_table() for part in self._parts()]
        return Mixture(source for source, _ in opened), [evaluation for _, evaluation in opened]

    def open_table(self) -> tuple[Source, Dataset]:
        """Return the rows to train on, those of a map-style table, and the rows to evaluate on."""
        train, evaluation = TextSource.load_rows(self)
        if evaluation is None:
            train, evaluation = TextSource.split(self, train)
        return TableReader(train, self.dataset), evaluation

    def open_shards(self) -> tuple[Source, Parts]:
        """Return the rows to train on, which are streamed, and where the rows to evaluate on are."""
        splits = self._find_splits()
        source, *evaluation = [self._open(splits[split]) for split in self.used_splits([*splits])]
        if evaluation:
            (reader,) = evaluation
            return source, (reader, [(group, 0, rows) for group, rows in enumerate(reader.sizes.tolist())])
        # the end of the last group
        size = min(HELD_OUT, self.held_out(int(source.sizes.sum())), int(source.sizes[-1]))
        source.sizes[-1] -= size
        first = int(source.sizes[-1])
        return source, (source, [(len(source.sizes) - 1, first, first + size)])

    def read_parts(self, evaluation: Parts, columns: dict[str, ColumnKind]) -> Dataset:
        """Return the rows to evaluate on that can be used, as a table. Raise a UserError if there are none."""
        source, parts = evaluation
        self.require_columns(columns, source.columns, f" in {PART_NAMES['eval']}")
        found: Rows = {name: [] for name in columns}
        for part in bar("groups of rows to evaluate on read", iterable=parts):
            rows, _ = usable_rows(source, part, columns, complaint, self.skip_bad_rows)
            for name, values in rows.items():
                found[name] += values
        if not all(found.values()):
            raise UserError(f"task.dataset={self.dataset}: none of its rows to evaluate on can be used")
        with explained(f"task.dataset={self.dataset}: its rows to evaluate on are no table, "):
            return Dataset.from_dict(found, source.features(tuple(columns)))

    @property
    def _cache(self) -> Path:
        return Path(datasets.config.HF_DATASETS_CACHE) / "streaming"

    def _open(self, files: dict[str, str]) -> ShardReader:
        """Return what reads those files that have a row. Raise a UserError if there are none, or if one lacks a column
        of the first."""
        shards = [shard for shard in index_shards(files, self._cache) if shard.groups]
        if not shards:
            raise UserError(f"task.dataset={self.dataset}: no row in its {len(files)} files")
        refuse(
            f"{shard.url}: no column {missing}, as other shards have"
            for shard in shards
            if (missing := " nor ".join(name for name in shards[0].columns if name not in shard.columns))
        )
        return ShardReader(shards)

    def _find_splits(self) -> dict[str, dict[str, str]]:
        """Return the shards of each split, each with its version."""
        if "://" in self.dataset or Path(self.dataset).exists():
            found = find_shards(self.dataset)
            return {split: {url: found[url] for url in urls} for split, urls in by_split(found).items()}
        with loading("dataset", self.dataset):
            files = load_dataset_builder(self.dataset, self.dataset_config).config.data_files or {}
        folders = {name.rpartition("/")[0] for names in files.values() for name in names}
        found = {url: version for folder in folders for url, version in find_shards(folder).items()}
        refuse(
            f"{name}: cannot be streamed, only {' and '.join(SUFFIXES)} files"
            for names in files.values()
            for name in names
            if name not in found
        )
        return {str(split): {name: found[name] for name in names} for split, names in files.items()}

    def usable_parts(self, train: Any, evaluation: Any, columns: dict[str, ColumnKind]) -> tuple[Any, Any]:
        if not self.is_streamed:
            return super().usable_parts(train, evaluation, columns)
        options = {"bad_rows": "skip"} if self.skip_bad_rows else {}
        usable, num_rows = [], 0
        for part, source, rows in zip(self._parts(), train, evaluation, strict=True):
            part.require_columns(columns, source.columns)
            if isinstance(rows, Dataset):
                num_rows += len(rows)
                usable.append(part.model_copy(update=options)._validate_rows(rows, "eval", columns))
            else:
                num_rows += sum(last - first for _, first, last in rows[1])
                usable.append(part.read_parts(rows, columns))
        self._skipped_rows["eval"] = num_rows - sum(map(len, usable))
        return train, usable

    def stream(self, sources: Mixture, columns: dict[str, ColumnKind], maker: Maker, capacity: int | None) -> Stream:
        """Return the training set: sequences of up to `capacity` tokens, or of one chunk each if that is None. The
        other arguments are those of Blocks."""
        key = Hasher.hash([columns, maker, self.skip_bad_rows, CODE])
        limit = int(self.cache_gb * 1e9)
        blocks = Blocks(columns, maker, self.skip_bad_rows, key, self._cache / "blocks", limit)
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


def unique_names(names: list[str]) -> list[str]:
    """Return a name for each dataset: the last part of its path, and a number where that is not the only one."""
    stems = [Path(name).stem for name in names]
    return [stem if stems.count(stem) == 1 else f"{stem}_{number}" for number, stem in enumerate(stems, start=1)]
