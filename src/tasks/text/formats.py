"""What each kind of text file holds, as it is written: where its groups of rows are, and the rows of a group.

A JSON value is what Python's json module reads, a cell of a csv or tsv is text, as its csv module reads it, and a .txt
is one document. Nothing is guessed: 1.10 and 001 stay so, a date is text, "NA" and "null" are words.
"""

import csv
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from io import BufferedReader, StringIO
from typing import Any, NamedTuple

from src.config.errors import cause

GROUP_ROWS = 1024
"""Rows of a text file that are read at once."""
BYTE_ORDER_MARK = b"\xef\xbb\xbf"
PIECE = 2**20
"""Bytes that are read of a file at once, while it is indexed."""
TSV: dict[str, Any] = {"delimiter": "\t", "quoting": csv.QUOTE_NONE}
"""Options of Python's csv module for a .tsv: in it, quotes are text too."""
END = "end"
"""A line that is put after those of a table: a quote that is still open swallows it."""
UTF8 = ("utf-8", "surrogateescape")
"""Bytes that are no UTF-8 are kept, so that the row with them can be named."""
NO_ROWS = 'no rows but one object: write a list of objects, or one a line (pandas: orient="records", lines=True)'
csv.field_size_limit(2**31 - 1)


class Group(NamedTuple):
    """Rows that are read at once."""

    rows: int
    size: int
    """Bytes."""
    start: int
    """First byte of them; of parquet, the row group's number."""
    end: int
    line: int
    """First line; of kinds that are not made of lines, first row."""


Record = tuple[int, int, int]
"""Bytes, lines and rows of what belongs together."""


def grouped(records: Iterable[Record], position: int) -> list[Group]:
    """Return groups of GROUP_ROWS rows. The first record begins at this byte."""
    groups, start, first, line, rows = [], position, 1, 1, 0
    for size, lines, number in records:
        position += size
        line += lines
        rows += number
        if rows >= GROUP_ROWS:
            groups.append(Group(rows, position - start, start, position, first))
            rows = 0
        if not rows:  # what comes before a group is none of it: a header, blank lines
            start, first = position, line
    if rows:
        groups.append(Group(rows, position - start, start, position, first))
    return groups


def merge(groups: list[Group], number: int) -> list[Group]:
    """Return so many adjacent groups of a text file as one each; the row groups of parquet, which have no last byte, as
    they are."""
    number = number if groups[0].end else 1
    together = [groups[i : i + number] for i in range(0, len(groups), number)]
    return [
        part[0]._replace(rows=sum(g.rows for g in part), size=sum(g.size for g in part), end=part[-1].end)
        for part in together
    ]


class Index(NamedTuple):
    """What one pass over a file finds."""

    columns: list[str]
    groups: list[Group]
    note: str = ""
    """What the user should know of it."""


class Parsed(NamedTuple):
    """The rows of a group."""

    rows: list[dict[str, Any]]
    lines: list[int]
    """Where each begins, counted from the group's first line."""
    unreadable: dict[int, str]
    """Why a row is none, by place. It is in `rows` too, perhaps without values."""


def index_lines(file: BufferedReader, start: int, _names: list[str]) -> Index:
    """Index a .jsonl file. Blank lines are no rows."""
    rows, groups = _first_rows_and_groups(file, start)
    return Index(_keys(rows), groups)


def _first_rows_and_groups(file: BufferedReader, start: int) -> tuple[list[Any], list[Group]]:
    """Return the rows in the first lines, and the groups."""
    head: list[bytes] = []

    def records() -> Iterator[Record]:
        for line in file:
            if len(head) < GROUP_ROWS:
                head.append(line)
            yield len(line), 1, bool(line.strip(b" \t\r\n"))

    groups = grouped(records(), start)
    return parse_lines(b"".join(head)).rows, groups


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
        row, reason = {}, f"but {type(row).__name__}"
    if reason:
        parsed.unreadable[len(parsed.rows)] = f"is no JSON object, {reason}"
    parsed.rows.append(row)


def index_json(file: BufferedReader, start: int, _names: list[str]) -> Index:
    """Index a .json file: a list of objects, which is read whole, or an object a line. Raise a ValueError if it is
    other JSON."""
    if file.peek(GROUP_ROWS).lstrip()[:1] != b"[":
        rows, groups = _first_rows_and_groups(file, start)
        is_one = sum(group.rows for group in groups) == 1
        if groups and (not any(rows) or (is_one and all(isinstance(v, dict | list) for v in rows[0].values()))):
            raise ValueError(NO_ROWS)
        return Index(_keys(rows), groups)
    data = file.read()
    rows = parse_json(data, ()).rows
    groups = [Group(len(rows), len(data), start, start + len(data), 1)] if rows else []
    return Index(_keys(rows[:GROUP_ROWS]), groups)


def parse_json(data: bytes, columns: Sequence[str]) -> Parsed:
    """Return the rows of a .json file's group."""
    if data.lstrip()[:1] != b"[":
        return parse_lines(data, columns)
    values = json.loads(data.decode(*UTF8))
    parsed = Parsed([], [*range(len(values))], {})
    for value in values:
        _add(parsed, value)
    return parsed


def index_table(file: BufferedReader, start: int, names: list[str], **dialect: Any) -> Index:
    """Index a .csv or .tsv file, whose header are `names` or, where there are none, its first line that is not blank.
    Raise a ValueError if the header names a column twice."""
    columns, longest, number = names, (1, 0), 0
    record: list[bytes] = []

    def text() -> Iterator[str]:
        for line in file:
            for part in line.splitlines(keepends=True):  # old Macs have other ends
                record.append(part)
                yield part.decode(*UTF8)

    def records() -> Iterator[Record]:
        nonlocal columns, longest, number
        for cells in csv.reader(text(), **dialect):  # it asks for no line beyond the record
            longest = max(longest, (len(record), number + 1))
            number += len(record)
            yield sum(map(len, record)), len(record), bool(cells and columns)
            columns = columns or cells
            record.clear()

    groups = grouped(records(), start)
    if twice := [name for name in columns if name and columns.count(name) > 1]:
        raise ValueError(f"two columns are called {twice[0]}")
    height, line = longest
    note = f"{number:,} lines are {sum(group.rows for group in groups):,} rows, as cells in quotes go over several: "
    note += f"the longest row has lines {line:,} to {line + height - 1:,}"
    return Index(columns, groups, note if height > 1 else "")


def parse_table(data: bytes, columns: Sequence[str], **dialect: Any) -> Parsed:
    """Return the rows of a .csv or .tsv file's group. A row may have fewer cells than there are columns."""
    lines = [*StringIO(data.decode(*UTF8), newline=""), END]
    reader, begin = csv.reader(lines, **dialect), 0
    parsed = Parsed([], [], {})
    for cells in reader:
        if begin == len(lines) - 1:  # this is END
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


def index_text(file: BufferedReader, start: int, _names: list[str]) -> Index:
    """Index a .txt file."""
    size = len(file.read())
    return Index(["text"], [Group(1, size, start, start + size, 1)] if size else [])


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
"""How each kind is indexed and its groups are read."""
HAVE_LINES = (".jsonl", ".csv", ".tsv")
"""Kinds whose rows are named by their line; in others they are counted."""
