"""The index of streamed files: where each block of their rows is, so that blocks are read alone and in any order.

A .jsonl file is indexed in one pass, a .parquet file by its footer.
"""

import hashlib
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache, partial
from io import BufferedReader
from itertools import chain, islice, pairwise
from os.path import basename
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pyarrow as pa
from datasets.fingerprint import Hasher
from pyarrow import parquet

from src.config.errors import RunError, UserError, raise_if_any
from src.config.terminal import bar
from src.tasks.text.files import content_version, list_files, with_retries
from src.tasks.text.rows import (
    BLOCK,
    ENCODING,
    Encoders,
    Record,
    cached_table,
    columns_of,
    declared_features,
    read_batches,
    read_file,
    read_jsonl,
    require_file_columns,
)

EXTENSIONS = (".jsonl", ".parquet")
Block = dict[str, Any]
"""Locates rows that are read together: the `file` and its `version`; the row `group` of a .parquet; of a .jsonl, the
first byte, `start`, and the `size` in bytes, which is estimated for parquet; the `first` row there, and the number of
`rows`; and the first `line` (for parquet, row). The `digest` changes with the content: it is a hash of a .jsonl's
bytes, or of a .parquet's footer, which has sizes and bounds of the values."""
READERS = 16
"""Files that are indexed at once: reading a remote footer is mostly waiting."""
READ_SIZE = 2**20
"""Bytes of a file that are read at once while it is indexed."""


class Source:
    """Holds the blocks of some files, in the order of their rows, and what a mixture takes from them."""

    def __init__(self, files: dict[str, str], block_rows: int, encoders: Encoders) -> None:
        """Index these files, given with their versions, in blocks of up to so many rows; later calls, even in another
        process, read the index from the cache. Raise a UserError that names all files that cannot be read, or lack a
        column of these encoders."""

        def blocks() -> Iterator[Block]:
            with ThreadPoolExecutor(READERS) as threads:
                tries = threads.map(partial(index_file, block_rows=block_rows, encoders=encoders), files.items())
                found = [*bar("files indexed", iterable=tries, total=len(files))]
            raise_if_any(mistake for mistake in found if isinstance(mistake, str))
            yield from chain.from_iterable(found)

        self._blocks = cached_table(blocks, [files, block_rows, [*encoders], Path(__file__).read_bytes()])
        columns = self._blocks.with_format("numpy")
        self.rows: np.ndarray = columns["rows"][:]
        """Rows of each block; shape (blocks,), int64."""
        self.sizes: np.ndarray = columns["size"][:]
        """Bytes of each block; shape (blocks,), int64."""
        self.tokens: np.ndarray = self.rows
        """Tokens of each block, as forecast; shape (blocks,), int64 or float64."""
        places = [f"{group} {file}" for group, file in zip(self._blocks["group"], self._blocks["file"], strict=True)]
        self.groups: np.ndarray = np.unique(places, return_inverse=True)[1]
        """The group of each block: those of a group, next to each other, are read together; shape (blocks,), int64."""
        self.weight, self.passes = 1.0, 1
        """In a mixture: the fraction of the rows, and how many times an epoch has each."""
        self.fingerprint = Hasher.hash([[*map(basename, self._blocks["file"])], self._blocks["digest"][:]])
        """Changes with the names, content and order of the files, not with their folder."""

    def __getitem__(self, number: int) -> Block:
        return self._blocks[number] | {"rows": int(self.rows[number])}

    def hold_out(self, wanted: int) -> list[Block]:
        """Take so many rows off the end. Return the blocks that they are in."""
        ends = np.cumsum(self.rows)
        kept = self.rows - np.clip(ends - (ends[-1] - wanted), 0, self.rows)
        taken = [(self[i], int(kept[i])) for i in np.flatnonzero(kept < self.rows).tolist()]
        count = np.count_nonzero(kept)
        self.sizes, self.groups = (self.sizes * kept / self.rows)[:count], self.groups[:count]
        self.rows = self.tokens = kept[:count]
        return [block | {"first": block["first"] + rows, "rows": block["rows"] - rows} for block, rows in taken]


def index_file(file: tuple[str, str], block_rows: int, encoders: Encoders) -> list[Block] | str:
    """Return the blocks of a file, given with its version, or why it cannot be used."""
    url, version = file

    def read() -> list[Block]:
        with fsspec.open(url, "rb") as opened:
            if url.lower().endswith(".parquet"):  # without its rows: one of them would be read with its row group
                footer = parquet.ParquetFile(opened)
                declared_features(footer.schema_arrow)
                blocks, names = [*index_parquet(footer.metadata, block_rows)], footer.schema_arrow.names
            else:
                blocks, names = [*index_jsonl(opened, block_rows)], columns_of(islice(read_file(url), BLOCK))
        if blocks:
            require_file_columns(encoders, names, url)
        return [block | {"file": url, "version": version} for block in blocks]

    try:
        return with_retries(url, read)
    except (RunError, UserError) as error:
        return str(error)


def index_parquet(metadata: parquet.FileMetaData, block_rows: int) -> Iterator[Block]:
    """Yield the blocks of a .parquet file, which divide up its row groups."""
    digest, line = Hasher.hash(metadata.to_dict()), 1
    for group in range(metadata.num_row_groups):
        found = metadata.row_group(group)
        for first, last in pairwise([*range(0, found.num_rows, block_rows), found.num_rows]):
            rows = last - first
            size = -(-found.total_byte_size * rows // found.num_rows)  # of repeated values, less than a byte a row
            place = {"group": group, "start": 0, "size": size, "first": first, "rows": rows, "line": line}
            yield place | {"digest": digest}
        line += found.num_rows


def index_jsonl(opened: Any, block_rows: int) -> Iterator[Block]:
    """Yield the blocks of a .jsonl file, each a group of its own."""
    start, line = 0, 1
    with BufferedReader(opened, READ_SIZE) as stream:
        while lines := [*islice(stream, block_rows)]:
            data = b"".join(lines)
            if rows := sum(bool(text.strip(b" \t\r\n")) for text in lines):
                place = {"group": line, "start": start, "size": len(data), "first": 0, "rows": rows, "line": line}
                yield place | {"digest": hashlib.sha256(data).hexdigest()}
            start += len(data)
            line += len(lines)


def read_block(block: Block, columns: Sequence[str]) -> list[Record]:
    """Return the rows of a block, with these columns. Raise a UserError if its file is not the one that was indexed, or
    a RunError if it could not be read in several tries."""
    file, line, first = block["file"], block["line"], block["first"]
    rows = slice(first, first + block["rows"])
    if file.lower().endswith(".parquet"):
        table = read_group(file, block["version"], block["group"], tuple(columns))[rows]
        return [*read_batches([table], declared_features(table.schema), line + first)]

    def read() -> bytes:
        require_unchanged(file, block["version"])
        system, path = fsspec.core.url_to_fs(file)
        start = block["start"]
        return system.cat_file(path, start=start, end=start + block["size"])  # s3fs has them in another order

    lines = with_retries(file, read).decode(ENCODING, "surrogateescape").split("\n")
    return [record._replace(number=line - 1 + record.number) for record in read_jsonl(lines)][rows]


@lru_cache(maxsize=2)  # a large row group is tokenized block by block
def read_group(file: str, version: str, group: int, columns: tuple[str, ...]) -> pa.Table:
    """Return a row group of a .parquet file, with these columns if it has them."""

    def read() -> pa.Table:
        require_unchanged(file, version)
        with fsspec.open(file, "rb") as stream:
            opened = parquet.ParquetFile(stream, pre_buffer=True)
            return opened.read_row_group(group, [name for name in opened.schema_arrow.names if name in columns])

    return with_retries(file, read)


def require_unchanged(file: str, version: str) -> None:
    """Raise a UserError if a file has another version. On the Hub, it never does, and has none."""
    if version and content_version(list_files(file).get(file, "")) != content_version(version):
        raise UserError(f"{file} has changed or disappeared since it was indexed: restore it, or start a new run")
