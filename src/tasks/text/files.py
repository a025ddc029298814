"""Data files, local or wherever fsspec reads: which there are, where their rows are, and the rows as written.

A JSON value is what Python's json module reads, a csv or tsv cell is text, as its csv module reads it, and a .txt is
one document. Nothing is guessed: 1.10 and 001 stay as they are, a date is text, "NA" and "null" are words. A file is
indexed once, in one pass; its groups of rows are then read without reading the rest.
"""

import csv
import hashlib
import io
import json
import os
import re
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, partial
from io import StringIO
from itertools import chain, islice
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple, TypeVar

import fsspec
import pyarrow as pa
from datasets import Features, load_dataset_builder
from huggingface_hub import constants
from huggingface_hub.errors import LocalEntryNotFoundError
from huggingface_hub.utils import get_session
from pyarrow import parquet

from src.config.errors import RunError, UserError, cause, raise_if_any, reraised_as
from src.config.terminal import bar
from src.tasks.text.listing import KINDS, list_files

T = TypeVar("T")
Splits = dict[str, list[str]]
"""File names by split."""
EVALUATION = ("validation", "valid", "val", "dev", "eval", "test")
"""Names of an evaluation split; the first one present is used."""
SPLITS = {"train": "train", "val": "validation", "dev": "validation", "eval": "test", "test": "test"}
"""Prefixes of words in file names, and the split that such a file belongs to."""
SPLIT_WORD = re.compile(rf"(?:^|[^a-z])({'|'.join(SPLITS)})")
FOLDERS = ("train", "training", *EVALUATION)
"""Names of folders that tell the split of the files in them."""
WAITS = (0.5, 1.0, 2.0, 4.0, 8.0)
"""Seconds to wait after each failed read before the next try."""
LASTING = (FileNotFoundError, PermissionError, IsADirectoryError, ImportError, ValueError, RecursionError, MemoryError)
"""Errors that another try would not fix; pyarrow's ArrowInvalid is a ValueError."""


def find_files(url: str) -> dict[str, str]:
    """Return the data files in a folder and those below it, or the only file, each with its version. Raise a UserError
    if there are none."""
    files = patiently(f"task.dataset={url}", lambda: list_files(url))
    if not files:
        raise UserError(f"task.dataset={url}: no files there of the kinds {', '.join(KINDS)}")
    return files


def by_split(files: Iterable[str]) -> Splits:
    """Return a folder's files by split, as the names of files and subfolders tell it; if none does, all are to train
    on."""
    files = [*files]
    splits: Splits = {}
    depth = len(PurePosixPath(os.path.commonpath([PurePosixPath(file).parent for file in files])).parts)
    for file in files:
        *folders, _ = PurePosixPath(file).parts[depth:]
        words = [*(folder for folder in folders if folder.lower() in FOLDERS), PurePosixPath(file).stem]
        if named := SPLIT_WORD.findall(" ".join(words).lower()):
            splits.setdefault(SPLITS[named[-1]], []).append(file)  # train_test_split_test.csv
    return splits or {"train": files}


def splits_of(dataset: str, config: str | None) -> Splits:
    """Return the files of a dataset on the Hub, or in a folder, by split, as `datasets` finds them."""
    found: Any = load_dataset_builder(dataset, config).config.data_files or {}
    return {str(split): [*names] for split, names in found.items()}


def patiently(url: str, read: Callable[[], T]) -> T:
    """Return what `read` returns, trying again after increasing waits if it fails. Raise a RunError after the last try,
    or a UserError at once if another try would not help."""
    for wait in (*WAITS, None):
        try:
            return read()
        except UserError:
            raise
        except Exception as error:  # aiohttp, botocore and many others have their own kinds
            if isinstance(error, LASTING) or "Credential" in type(error).__name__:
                raise UserError(f"{url}: cannot be read: {cause(error)[:200]}") from error
            if wait is None:
                says = f"cannot be read, tried {len(WAITS) + 1} times: {cause(error)[:200]}"
                raise RunError(f"{url}: {says}") from error
            time.sleep(wait)
    raise AssertionError


GROUP_ROWS = 1024
"""Rows of a text file that are read at once."""
BYTE_ORDER_MARK = b"\xef\xbb\xbf"
PIECE = 2**20
"""Bytes of a file that are read at once while it is indexed."""
TSV: dict[str, Any] = {"delimiter": "\t", "quoting": csv.QUOTE_NONE}
"""Options of Python's csv module for a .tsv, in which quotes are plain text."""
SENTINEL = "end"
"""A line added after a table's own: a quote that is still open swallows it."""
UTF8 = ("utf-8", "surrogateescape")
"""Bytes that are not UTF-8 are kept, so that messages can name their row."""
NO_ROWS = 'one object, not rows: write a list of objects, or one per line (pandas: orient="records", lines=True)'
csv.field_size_limit(2**31 - 1)


class Group(NamedTuple):
    """Locates a group of rows that are read at once."""

    rows: int
    size: int
    """Bytes."""
    start: int
    """First byte; for parquet, the row group's number."""
    end: int
    line: int
    """First line; for kinds without lines, first row."""


RecordSize = tuple[int, int, int]
"""Number of bytes, lines and rows of a record."""


def grouped(records: Iterable[RecordSize], position: int) -> list[Group]:
    """Return groups of GROUP_ROWS rows. The first record begins at byte `position`."""
    groups, start, first, line, rows = [], position, 1, 1, 0
    for size, lines, number in records:
        position += size
        line += lines
        rows += number
        if rows >= GROUP_ROWS:
            groups.append(Group(rows, position - start, start, position, first))
            rows = 0
        if not rows:  # a header or blank lines before a group are not part of it
            start, first = position, line
    if rows:
        groups.append(Group(rows, position - start, start, position, first))
    return groups


class Index(NamedTuple):
    """Holds the result of one pass over a file."""

    columns: list[str]
    groups: list[Group]
    note: str = ""
    """Something that the user should know about the file."""


class Parsed(NamedTuple):
    """Holds the parsed rows of a group."""

    rows: list[dict[str, Any]]
    lines: list[int]
    """The line where each begins, counted from the group's first."""
    unreadable: dict[int, str]
    """Why a row is unreadable, by position. It is in `rows` too, perhaps without values."""


def index_lines(lines: Iterator[bytes], start: int, _names: list[str]) -> Index:
    """Index a .jsonl file, ignoring blank lines. Its columns are those of the first lines."""
    head = [*islice(lines, GROUP_ROWS)]
    records = ((len(line), 1, bool(line.strip(b" \t\r\n"))) for line in chain(head, lines))
    return Index(_keys(parse_lines(b"".join(head)).rows), grouped(records, start))


def _keys(rows: list[Any]) -> list[str]:
    return [*dict.fromkeys(name for row in rows for name in row)]


def parse_lines(data: bytes, _columns: Sequence[str] = ()) -> Parsed:
    """Return the rows of a .jsonl file's group."""
    parsed = Parsed([], [], {})
    for number, line in enumerate(data.decode(*UTF8).split("\n")):
        text = line.strip(" \t\r\n")
        if text:
            parsed.lines.append(number)
            try:
                _add(parsed, json.loads(text))
            except (ValueError, RecursionError) as error:
                _add(parsed, {}, cause(error))
    return parsed


def _add(parsed: Parsed, row: Any, reason: str = "") -> None:
    if not isinstance(row, dict):
        row, reason = {}, f"found {type(row).__name__}"
    if reason:
        parsed.unreadable[len(parsed.rows)] = f"is not a JSON object: {reason}"
    parsed.rows.append(row)


def index_json(lines: Iterator[bytes], start: int, _names: list[str]) -> Index:
    """Index a .json file: a list of objects, which is read whole, or one object per line. Raise a ValueError for any
    other JSON."""
    head = [*islice(lines, GROUP_ROWS)]
    lines = chain(head, lines)
    first = b"".join(head)
    if first.lstrip()[:1] != b"[":
        rows = parse_lines(first).rows
        if rows and (not any(rows) or (len(rows) == 1 and all(isinstance(v, dict | list) for v in rows[0].values()))):
            raise ValueError(NO_ROWS)
        return index_lines(lines, start, _names)
    data = b"".join(lines)
    rows = parse_json(data, ()).rows
    return Index(_keys(rows[:GROUP_ROWS]), grouped([(len(data), 1, len(rows))], start))


def parse_json(data: bytes, columns: Sequence[str]) -> Parsed:
    """Return the rows of a .json file's group."""
    if data.lstrip()[:1] != b"[":
        return parse_lines(data, columns)
    values = json.loads(data.decode(*UTF8))
    parsed = Parsed([], [*range(len(values))], {})
    for value in values:
        _add(parsed, value)
    return parsed


def index_table(lines: Iterator[bytes], start: int, names: list[str], **dialect: Any) -> Index:
    """Index a .csv or .tsv file, whose header is `names` or, if that is empty, the first line that is not blank. Raise
    a ValueError if the header names a column twice."""
    columns, longest = names, (1, 0)
    record: list[bytes] = []

    def text() -> Iterator[str]:
        for line in lines:
            for part in line.splitlines(keepends=True):  # old Macs end lines differently
                record.append(part)
                yield part.decode(*UTF8)

    reader = csv.reader(text(), **dialect)

    def records() -> Iterator[RecordSize]:
        nonlocal columns, longest
        for cells in reader:  # it reads no line beyond the record
            longest = max(longest, (len(record), reader.line_num))
            yield sum(map(len, record)), len(record), bool(cells and columns)
            columns = columns or cells
            record.clear()

    groups = grouped(records(), start)
    if twice := [name for name, count in Counter(columns).items() if name and count > 1]:
        raise ValueError(f"two columns are called {twice[0]}")
    height, last = longest
    note = f"{reader.line_num:,} lines are {sum(group.rows for group in groups):,} rows, as quoted cells span several: "
    note += f"the longest row is lines {last - height + 1:,} to {last:,}"
    return Index(columns, groups, note if height > 1 else "")


def parse_table(data: bytes, columns: Sequence[str], **dialect: Any) -> Parsed:
    """Return the rows of a .csv or .tsv file's group. A row may have fewer cells than there are columns."""
    lines = [*StringIO(data.decode(*UTF8), newline=""), SENTINEL]
    reader, begin = csv.reader(lines, **dialect), 0
    parsed = Parsed([], [], {})
    for cells in reader:
        if begin == len(lines) - 1:  # this is SENTINEL
            break
        if len(cells) > len(columns):
            parsed.unreadable[len(parsed.rows)] = f"has {len(cells)} cells for {len(columns)} columns"
        if cells:  # else the line is blank
            parsed.rows.append(dict(zip(columns, cells, strict=False)))
            parsed.lines.append(begin)
        begin = reader.line_num
    else:
        parsed.unreadable[len(parsed.rows) - 1] = "has a quote that is never closed"
    return parsed


def index_text(lines: Iterator[bytes], start: int, _names: list[str]) -> Index:
    """Index a .txt file."""
    size = sum(map(len, lines))
    return Index(["text"], grouped([(size, 1, size > 0)], start))


def parse_text(data: bytes, _columns: Sequence[str]) -> Parsed:
    """Return the only row of a .txt file."""
    return Parsed([{"text": data.decode(*UTF8)}], [0], {})


TEXT_FORMATS: dict[str, tuple[Callable[..., Index], Callable[[bytes, Sequence[str]], Parsed]]] = {
    ".txt": (index_text, parse_text),
    ".jsonl": (index_lines, parse_lines),
    ".json": (index_json, parse_json),
    ".csv": (index_table, parse_table),
    ".tsv": (partial(index_table, **TSV), partial(parse_table, **TSV)),
}
"""How each kind is indexed, and how its groups are parsed."""
HAVE_LINES = (".jsonl", ".csv", ".tsv")
"""Kinds whose rows are named by line; rows of other kinds are counted."""


INDEX_CODE = Path(__file__).read_text(encoding="utf-8")
"""The source code that makes an index: when it changes, files are indexed again."""
READERS = 16
"""Files that are indexed at once: reading a remote footer is mostly waiting."""


@dataclass(frozen=True, eq=False)
class Shard:
    """Describes an indexed file. What is read from it is cached per object."""

    url: str
    version: str
    """The file's version, as the file system reports it."""
    digest: str
    """SHA-256 of all bytes; for parquet, of the footer alone, which says where each part of the file is and gives the
    bounds of its values."""
    columns: list[str]
    groups: list[Group]
    note: str

    @property
    def kind(self) -> str:
        return Path(self.url).suffix.lower()


def index_files(files: dict[str, str], column_names: list[str], cache: Path) -> list[Shard]:
    """Return the index of the files from `find_files`; from the cache, if nothing has changed since it was made.
    `column_names` are the columns of tables without a header. Raise a UserError that names all files that cannot be
    indexed."""
    key = json.dumps([files, column_names, INDEX_CODE])
    file = cache / f"index-{hashlib.sha256(key.encode()).hexdigest()}.json"
    if not file.exists():
        with ThreadPoolExecutor(READERS) as threads:
            tries = threads.map(lambda url: _index(url, files[url], column_names), files)
            done = [*bar("files indexed", iterable=tries, total=len(files))]
        raise_if_any(found for found in done if isinstance(found, str))
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
    declared_features(opened.schema_arrow)
    groups, row = [], 1
    for number in range(opened.num_row_groups):
        found = opened.metadata.row_group(number)
        if found.num_rows:
            groups.append(Group(found.num_rows, found.total_byte_size, number, 0, row))
        row += found.num_rows
    file.seek(-opened.metadata.serialized_size, os.SEEK_END)
    return hashlib.sha256(file.read()).hexdigest(), Index(opened.schema_arrow.names, groups)


def declared_features(schema: pa.Schema) -> Features:
    """Return the features that `datasets` wrote into a parquet file; none if something else wrote it. Raise a
    ValueError if they are damaged, or of a kind that is not known here."""
    with reraised_as(ValueError, "its metadata are not those of `datasets`: "):
        written = json.loads((schema.metadata or {}).get(b"huggingface", b"{}"))
        return Features.from_dict(written.get("info", {}).get("features") or {})


def _index_text(file: Any, kind: str, column_names: list[str]) -> tuple[str, Index]:
    digest = hashlib.sha256()

    def hashed(opened: io.BufferedReader) -> Iterator[bytes]:
        while lines := opened.readlines(PIECE):
            digest.update(b"".join(lines))
            yield from lines

    with io.BufferedReader(file, PIECE) as opened:
        head = opened.peek()[:3]
        if {*head[:2]} & {0, 0xFE, 0xFF}:  # of UTF-8, no text has these
            raise ValueError("its text is UTF-16: save it as UTF-8")
        start = len(opened.read(3)) if head == BYTE_ORDER_MARK else 0
        make, _ = TEXT_FORMATS[kind]
        index = make(hashed(opened), start, column_names)
    return digest.hexdigest(), index


SECONDS = 5
"""Seconds that the Hub may take to answer."""


@cache
def can_reach_hub() -> bool:
    """Return whether the Hub answers. If not, work offline from now on, with what was fetched before: its client would
    try six times for each file, for half a minute."""
    if not constants.HF_HUB_OFFLINE:
        try:
            get_session().head(constants.ENDPOINT, timeout=SECONDS)
        except Exception:  # the client may use either of two libraries, each with its own errors
            constants.HF_HUB_OFFLINE = True
    return not constants.HF_HUB_OFFLINE


@contextmanager
def loading(setting: str, name: str | None) -> Iterator[None]:
    """Turn any failure to load what `task.<setting>` names, locally or on the Hub, into a one-line UserError, unless it
    is an error of ours already."""
    if name and "://" not in name and not Path(name).exists():
        can_reach_hub()
    try:
        yield
    except (UserError, RunError):
        raise
    except Exception as error:  # transformers, datasets, safetensors, torch and the Hub's client raise many kinds
        reason = f"cannot be loaded: {cause(error).split('. ')[0][:300]}"
        if "trust_remote_code" in str(error):
            reason = "needs to run code of its own, which is not allowed here; use one that transformers supports"
        elif isinstance(error.__cause__, LocalEntryNotFoundError):
            reason = f"the Hub cannot be reached; give a folder that has it, --task.{setting}=FOLDER"
        raise UserError(f"task.{setting}={name}: {reason}") from error
