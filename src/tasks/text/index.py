"""The index of files with rows: made once in a pass over each, and then known without reading it."""

import hashlib
import io
import json
import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import fsspec
from pyarrow import parquet

from src.config.errors import RunError, UserError, refuse
from src.config.terminal import bar
from src.tasks.text import formats
from src.tasks.text.files import patiently
from src.tasks.text.formats import BYTE_ORDER_MARK, PIECE, TEXT_FORMATS, Group, Index

CODE = Path(formats.__file__).read_text(encoding="utf-8")
"""The source of what makes an index: when it changes, files are indexed again."""
READERS = 16
"""Files that are indexed at once: to read a footer elsewhere is mostly to wait."""


@dataclass(frozen=True, eq=False)
class Shard:
    """A file as the index has it. What is read of it is cached by the object."""

    url: str
    version: str
    """What the file system says of the file's version."""
    digest: str
    """SHA-256 of all bytes; of parquet's footer alone, which says where each part of the file is and within which
    bounds its values are."""
    columns: list[str]
    groups: list[Group]
    note: str

    @property
    def kind(self) -> str:
        return Path(self.url).suffix.lower()


def index_files(files: dict[str, str], column_names: list[str], cache: Path) -> list[Shard]:
    """Return the index of what `find_files` found; from the cache, if it is there and nothing has changed since.
    `column_names` are the columns of tables without a header. Raise a UserError that names all files which cannot be
    indexed."""
    key = json.dumps([files, column_names, CODE])
    file = cache / f"index-{hashlib.sha256(key.encode()).hexdigest()}.json"
    if not file.exists():
        with ThreadPoolExecutor(READERS) as threads:
            tries = threads.map(lambda url: _index(url, files[url], column_names), files)
            done = [*bar("files indexed", iterable=tries, total=len(files))]
        refuse(found for found in done if isinstance(found, str))
        cache.mkdir(parents=True, exist_ok=True)
        unfinished = file.with_suffix(f".{os.getpid()}")
        unfinished.write_bytes(json.dumps(done, default=vars).encode())
        unfinished.replace(file)
    found = json.loads(file.read_bytes())
    return [Shard(**fields | {"groups": [Group(*group) for group in fields["groups"]]}) for fields in found]


def _index(url: str, version: str, column_names: list[str]) -> Shard | str:
    """Return the index of a file, or why there is none."""
    kind = Path(url).suffix.lower()

    def make() -> Shard:
        with fsspec.open(url, "rb") as file:
            digest, index = _index_parquet(file) if kind == ".parquet" else _index_text(file, kind, column_names)
        return Shard(url, version, digest, *index)

    try:
        return patiently(url, make)
    except (RunError, UserError) as error:
        return str(error)


def _index_parquet(file: Any) -> tuple[str, Index]:
    opened = parquet.ParquetFile(file)
    groups, row = [], 1
    for number in range(opened.num_row_groups):
        found = opened.metadata.row_group(number)
        if found.num_rows:
            groups.append(Group(found.num_rows, found.total_byte_size, number, 0, row))
        row += found.num_rows
    file.seek(-opened.metadata.serialized_size, os.SEEK_END)
    return hashlib.sha256(file.read()).hexdigest(), Index(opened.schema_arrow.names, groups)


def _index_text(file: Any, kind: str, column_names: list[str]) -> tuple[str, Index]:
    hashed = _Hashed(file)
    opened = io.BufferedReader(hashed, PIECE)
    has_mark = opened.peek()[:3] == BYTE_ORDER_MARK
    start = len(opened.read(3)) if has_mark else 0
    make, _ = TEXT_FORMATS[kind]
    index = make(opened, start, column_names)
    return hashed.digest.hexdigest(), index


class _Hashed(io.RawIOBase):
    """A file of which all bytes are hashed as they are read."""

    def __init__(self, file: Any) -> None:
        self._file, self.digest = file, hashlib.sha256()

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        data = self._file.read(len(buffer))
        self.digest.update(data)
        buffer[: len(data)] = data
        return len(data)
