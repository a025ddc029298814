"""The readers of rows: groups of them from files or tables, for loaded, streamed and mixed data alike."""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property, lru_cache
from pathlib import Path

import fsspec
import numpy as np
import pyarrow as pa
from datasets import Dataset
from pyarrow import parquet

from src.config.errors import UserError
from src.tasks.text.files import lasting, list_files, patiently
from src.tasks.text.formats import HAVE_LINES, TEXT_FORMATS, Group, Parsed, merge
from src.tasks.text.index import Shard
from src.tasks.text.values import Encoders, Found, arrow_values, declared_features

Part = tuple[int, int, int]
"""Rows of a source: the group, the first one in it, and that after the last one."""
BLOCK = 1024
"""Rows that are read from a table, or made into tokens, and kept together."""
MERGED = 16
"""Groups that are read at once where all are: a call of Arrow's reader costs half a millisecond."""


class ShardReader:
    """The rows of files, group by group."""

    def __init__(self, shards: list[Shard]) -> None:
        self.shards = shards
        self.groups = [(shard, group) for shard in shards for group in shard.groups]
        self.sizes = np.array([group.rows for _, group in self.groups])
        """Rows of each group; shape (groups,), int64."""
        self.row_bytes = np.array([group.size / group.rows for _, group in self.groups])
        """Mean bytes of its rows, in all columns; shape (groups,), float64."""
        self.column_names = [*dict.fromkeys(name for shard in shards for name in shard.columns)]
        names = [[Path(shard.url).name, shard.digest] for shard in shards]
        self.fingerprint = hashlib.sha256(json.dumps(names).encode()).hexdigest()
        """Changes with the content of any file and with their order, not with the folder that they are in."""

    def read(self, number: int, first: int, last: int, columns: Sequence[str]) -> Found:
        """Return rows of a group, and why some of these are unreadable, by place. What is not there is None.

        Raises:
            UserError: the file is another one than that which was indexed.
            RunError: it could not be read, in several tries.
        """
        shard, group = self.groups[number]
        if shard.kind == ".parquet":
            own = tuple(name for name in columns if name in shard.columns)
            table = patiently(shard.url, lambda: _row_group(shard, group.start, own))
            return arrow_values(table[first:last], columns, declared_features(table.schema))
        parsed = _parse(shard, group)
        bad = {place - first: reason for place, reason in parsed.unreadable.items() if first <= place < last}
        return {name: [row.get(name) for row in parsed.rows[first:last]] for name in columns}, bad

    def merged(self) -> "ShardReader":
        """Return a reader whose groups are MERGED of these, to read all of them in fewer calls."""
        return ShardReader([replace(shard, groups=merge(shard.groups, MERGED)) for shard in self.shards])

    @property
    def content(self) -> list[str]:
        """Return what changes with the content of the files: of text its digest, whatever tar, rsync and the layers of
        an image make of its time; of parquet, whose footer alone the index has seen, its version too."""
        return [shard.digest + shard.version * (shard.kind == ".parquet") for shard in self.shards]

    def version(self, number: int) -> str:
        """Return what changes with a group's content, also where the footer of its file stays as it was."""
        shard, group = self.groups[number]
        return f"{shard.url} {shard.version} {group.start}"

    def name(self, number: int, row: int) -> str:
        """Return the name of a group's row for messages: the file, and the line or the row, counted from 1."""
        shard, group = self.groups[number]
        if shard.kind in HAVE_LINES:
            return f"{shard.url}, line {group.line + _parse(shard, group).lines[row]}"
        return f"{shard.url}, row {group.line + row}"


class TableReader:
    """The rows of a table, in groups of BLOCK."""

    shards: tuple[Shard, ...] = ()

    def __init__(self, table: Dataset, dataset: str) -> None:
        self._table, self._dataset, self.fingerprint = table.with_format("arrow"), dataset, table._fingerprint
        self.column_names = table.column_names
        self.sizes = np.array([min(BLOCK, len(table) - first) for first in range(0, len(table), BLOCK)])

    @cached_property
    def row_bytes(self) -> np.ndarray:
        """Return the mean bytes of a row of each group, in all columns; shape (groups,), float64."""
        return np.array([rows.nbytes / len(rows) for rows in self._table.iter(BLOCK)])

    def read(self, number: int, first: int, last: int, columns: Sequence[str]) -> Found:
        """Return rows of a group, and why some of these are unreadable, by place."""
        before = number * BLOCK
        return arrow_values(self._table[before + first : before + last], columns, self._table.features)

    def merged(self) -> "TableReader":
        """Return itself: its groups are cut from a table in memory."""
        return self

    @property
    def content(self) -> list[str]:
        """Return what changes with the content of the table."""
        return [self.fingerprint]

    def version(self, number: int) -> str:
        """Return what changes with a group's content."""
        return f"{self.fingerprint} {number}"

    def name(self, number: int, row: int) -> str:
        """Return the name of a group's row for messages."""
        return f"{self._dataset}, row {number * BLOCK + row + 1}"


Source = ShardReader | TableReader
"""Where rows are."""


def parts_of(source: Source) -> list[Part]:
    """Return all rows of a source, in parts of a group each or, of large ones, of MERGED * BLOCK rows."""
    most = MERGED * BLOCK
    return [
        (number, first, min(first + most, size))
        for number, size in enumerate(source.sizes.tolist())
        for first in range(0, size, most)
    ]


def read_text(source: Source, part: Part, columns: Encoders) -> Found:
    """Return the rows of a part as the text that is kept of them, and why some of them cannot be used, by place."""
    number, first, last = part
    rows, bad = source.read(number, first, last, [*columns])
    for name, encode in columns.items():
        values = rows[name]
        for place, value in enumerate(values):
            try:
                values[place] = encode(value)
            except ValueError as error:
                values[place] = None
                bad.setdefault(place, f"{name} {error}")
    return rows, bad


@lru_cache(maxsize=2)  # a large row group is tokenized block by block
def _row_group(shard: Shard, number: int, columns: tuple[str, ...]) -> pa.Table:
    _require_unchanged(shard)
    with fsspec.open(shard.url, "rb") as file:
        return parquet.ParquetFile(file, pre_buffer=True).read_row_group(number, [*columns])


@lru_cache(maxsize=2)  # a .json file is one group
def _parse(shard: Shard, group: Group) -> Parsed:
    """Return the rows of a text file's group."""

    def read() -> bytes:
        _require_unchanged(shard)
        system, path = fsspec.core.url_to_fs(shard.url)
        return system.cat_file(path, start=group.start, end=group.end)  # s3fs has another order

    _, parse = TEXT_FORMATS[shard.kind]
    return parse(patiently(shard.url, read), shard.columns)


def _require_unchanged(shard: Shard) -> None:
    found = list_files(shard.url).get(shard.url, "")
    if lasting(found) != lasting(shard.version):
        says = "has changed or is gone since it was indexed: put it back as it was, or begin a new run"
        raise UserError(f"{shard.url} {says}")
