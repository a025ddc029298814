"""Files of rows that are never loaded whole: an index of them, made once, and the reading of a part of one.

A shard is a .parquet or .jsonl file, here or wherever fsspec reads: hf://, s3://, gs://. Its groups are the row groups
of parquet, or GROUP_LINES lines of a .jsonl file.
"""

import hashlib
import json
import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import fsspec
import numpy as np
import pyarrow as pa
from datasets import Features
from pyarrow import parquet

from src.config.errors import RunError, UserError, cause, refuse
from src.config.terminal import bar

T = TypeVar("T")
Rows = dict[str, list[Any]]
"""Values of rows, by column."""
SUFFIXES = (".parquet", ".jsonl")
GROUP_LINES = 1024
"""Lines of a .jsonl file that are read at once."""
PIECE = 2**24
"""Bytes of a .jsonl file that are indexed at once."""
READERS = 16
"""Files that are indexed at once: to read a footer elsewhere is mostly to wait."""
WAITS = (0.5, 1.0, 2.0, 4.0, 8.0)
"""Seconds to wait after each failure to read, before the next try."""
LASTING = (FileNotFoundError, PermissionError, IsADirectoryError, ImportError, ValueError)
"""Errors that another try would not mend; pyarrow's ArrowInvalid is a ValueError."""
VERSIONS = ("size", "ETag", "etag", "blob_id", "md5Hash", "generation", "mtime", "LastModified", "created")
"""What file systems call that which changes with a file's content. `created` of a local file is the time of its last
change, which, unlike `mtime`, no copying tool sets back."""


class Shard(NamedTuple):
    """A file as the index has it."""

    url: str
    version: str
    """What the file system says of the file's version."""
    digest: str
    """SHA-256 of parquet's footer, which says where each part of the file is and within which bounds its values are; of
    all bytes of a .jsonl file."""
    columns: list[str]
    groups: list[tuple[int, int, int, int]]
    """Rows of each group, its bytes, and the row group's number; of a .jsonl file, its first byte and that after it."""


class ShardReader:
    """The rows of shards, group by group."""

    def __init__(self, shards: list[Shard]) -> None:
        self.groups = [(shard, *group) for shard in shards for group in shard.groups]
        self.sizes = np.array([rows for _, rows, *_ in self.groups])
        """Rows of each group; shape (groups,), int64."""
        self.row_bytes = np.array([size / rows for _, rows, size, *_ in self.groups])
        """Mean bytes of its rows, in all columns; shape (groups,), float64."""
        self.columns = shards[0].columns
        names = [[Path(shard.url).name, shard.digest] for shard in shards]
        self.fingerprint = hashlib.sha256(json.dumps(names).encode()).hexdigest()
        """Changes with the content of any shard and with their order, not with the folder that they are in."""

    def read(self, number: int, first: int, last: int, columns: tuple[str, ...]) -> tuple[Rows, dict[int, str]]:
        """Return rows of a group, and why some of these are unreadable, by place. A value that is not there is None.

        Raises:
            UserError: the shard is another one than that which was indexed.
            RunError: it could not be read, in several tries.
        """
        shard, _, _, start, end = self.groups[number]
        if shard.url.lower().endswith(".parquet"):
            table = patiently(shard.url, lambda: _row_group(shard.url, shard.version, start, columns))
            return table[first:last].to_pydict(), {}
        lines = patiently(shard.url, lambda: _read_bytes(shard, start, end))
        rows, unreadable = parse(lines.removesuffix(b"\n").split(b"\n")[first:last])
        return {name: [row.get(name) for row in rows] for name in columns}, unreadable

    def features(self, columns: tuple[str, ...]) -> Features | None:
        """Return the types of these columns, with the names of labels, where parquet has them."""
        shard, _, _, number, _ = self.groups[0]
        if not shard.url.lower().endswith(".parquet"):
            return None
        table = patiently(shard.url, lambda: _row_group(shard.url, shard.version, number, columns))
        return Features.from_arrow_schema(table.schema)

    def version(self, number: int) -> str:
        """Return what changes with a group's content, also where the footer of its file stays as it was."""
        shard, _, _, start, _ = self.groups[number]
        return f"{shard.url} {shard.version} {start}"

    def name(self, number: int, row: int) -> str:
        """Return the name of a group's row for messages: the shard, and the row counted from 1."""
        url = self.groups[number][0].url
        before = sum(rows for shard, rows, *_ in self.groups[:number] if shard.url == url)
        return f"{url}, row {before + row + 1}"


def find_shards(url: str) -> dict[str, str]:
    """Return the shards in a folder, or the only one, each with its version. Hidden ones are none: whose names, or
    folders', begin with a dot or an underscore. Raise a UserError if there are none."""
    shards = patiently(f"task.dataset={url}", lambda: _list(url))
    if not shards:
        raise UserError(f"task.dataset={url}: no {' or '.join(SUFFIXES)} file there to stream")
    return shards


def _list(url: str) -> dict[str, str]:
    system, path = fsspec.core.url_to_fs(url)
    system.invalidate_cache()
    shards = {}
    for name, info in sorted(system.find(path, detail=True).items()):
        inner = name.removeprefix(path).strip("/").split("/")
        is_hidden = any(part.startswith((".", "_")) for part in inner)
        if not is_hidden and name.lower().endswith(SUFFIXES):
            full_name = name if "file" in system.protocol else system.unstrip_protocol(name)
            shards[full_name] = " ".join(str(info[key]) for key in VERSIONS if key in info)
    return shards


def index_shards(shards: dict[str, str], cache: Path) -> list[Shard]:
    """Return the index of what `find_shards` found; from the cache, if it is there and nothing has changed since. Raise
    a UserError that names all shards which cannot be indexed."""
    file = cache / f"index-{hashlib.sha256(json.dumps(shards).encode()).hexdigest()}.json"
    if not file.exists():
        with ThreadPoolExecutor(READERS) as threads:
            tries = threads.map(_index, shards, shards.values())
            done = [*bar("files indexed", iterable=tries, total=len(shards))]
        refuse(found for found in done if isinstance(found, str))
        cache.mkdir(parents=True, exist_ok=True)
        unfinished = file.with_suffix(f".{os.getpid()}")
        unfinished.write_text(json.dumps(done))
        unfinished.replace(file)
    return [Shard(*fields) for fields in json.loads(file.read_text())]


def _index(url: str, version: str) -> Shard | str:
    """Return the index of a shard, or why there is none."""
    make = _index_parquet if url.lower().endswith(".parquet") else _index_lines
    try:
        return patiently(url, lambda: Shard(url, version, *make(url)))
    except (RunError, UserError) as error:
        return str(error)


def _index_parquet(url: str) -> tuple[str, list[str], list[tuple[int, int, int, int]]]:
    with fsspec.open(url, "rb") as file:
        opened = parquet.ParquetFile(file)
        found = [opened.metadata.row_group(i) for i in range(opened.num_row_groups)]
        groups = [(group.num_rows, group.total_byte_size, i, 0) for i, group in enumerate(found) if group.num_rows]
        file.seek(-opened.metadata.serialized_size, os.SEEK_END)
        digest = hashlib.sha256(file.read()).hexdigest()
    return digest, opened.schema_arrow.names, groups


def _index_lines(url: str) -> tuple[str, list[str], list[tuple[int, int, int, int]]]:
    digest, groups = hashlib.sha256(), []
    start, rows, position = 0, 0, 0
    with fsspec.open(url, "rb") as file:
        first_lines = (parse([line])[0][0] for line in islice(file, GROUP_LINES))
        columns = next(filter(None, first_lines), {})
        file.seek(0)
        while piece := file.read(PIECE):
            digest.update(piece)
            ends = position + 1 + np.flatnonzero(np.frombuffer(piece, np.uint8) == ord("\n"))
            position += len(piece)
            for end in ends[GROUP_LINES - 1 - rows :: GROUP_LINES].tolist():  # where a group is full
                groups.append((GROUP_LINES, end - start, start, end))
                start = end
            rows = (rows + len(ends)) % GROUP_LINES
            has_end = piece.endswith(b"\n")
    if position > start:
        groups.append((rows + (not has_end), position - start, start, position))
    return digest.hexdigest(), [*columns], groups


@lru_cache(maxsize=2)  # a large row group is tokenized block by block
def _row_group(url: str, version: str, number: int, columns: tuple[str, ...]) -> pa.Table:
    _require_unchanged(url, version)
    with fsspec.open(url, "rb") as file:
        return parquet.ParquetFile(file, pre_buffer=True).read_row_group(number, [*columns])


def _read_bytes(shard: Shard, start: int, end: int) -> bytes:
    _require_unchanged(shard.url, shard.version)
    system, path = fsspec.core.url_to_fs(shard.url)
    return system.cat_file(path, start=start, end=end)  # s3fs has another order


def _require_unchanged(url: str, version: str) -> None:
    if _list(url) != {url: version}:
        raise UserError(f"{url} has changed or is gone since it was indexed: put it back as it was, or begin a new run")


def parse(lines: list[bytes]) -> tuple[list[dict[str, Any]], dict[int, str]]:
    """Return the rows of a .jsonl file, without columns where a line is no JSON object, and why it is none."""
    rows: list[dict[str, Any]] = []
    unreadable = {}
    for place, line in enumerate(lines):
        try:
            row = dict(**json.loads(line))
            if b"\\ud" in line.lower():  # an emoji, or half of one, which no tokenizer takes
                json.dumps(row, ensure_ascii=False).encode()
            rows.append(row)
        except (ValueError, TypeError, RecursionError) as error:
            unreadable[place] = f"is no JSON object, {cause(error)}"
            rows.append({})
    return rows, unreadable


def patiently(url: str, read: Callable[[], T]) -> T:
    """Return what `read` does, tried again after longer and longer waits if it fails; raise a RunError at last. Raise a
    UserError at once if it failed for good."""
    for wait in (*WAITS, None):
        try:
            return read()
        except UserError:
            raise
        except Exception as error:  # of aiohttp's, botocore's and many others' kinds
            if isinstance(error, LASTING) or "Credential" in type(error).__name__:
                raise UserError(f"{url}: cannot be read, {cause(error)[:200]}") from error
            if wait is None:
                says = f"cannot be read, tried {len(WAITS) + 1} times, {cause(error)[:200]}"
                raise RunError(f"{url}: {says}") from error
            time.sleep(wait)
    raise AssertionError
