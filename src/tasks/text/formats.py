"""What each kind of text file holds, as it is written: where its groups of rows are, and the rows of a group.

A JSON value is what Python's json module reads, a cell of a csv or tsv is text, as its csv module reads it, and a .txt
is one document. Nothing is guessed: 1.10 and 001 stay so, a date is text, "NA" and "null" are words.
"""

import csv
import io
import json
import re
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import chain
from typing import Any, NamedTuple

from src.config.errors import cause

GROUP_ROWS = 1024
"""Rows of a text file that are read at once."""
BYTE_ORDER_MARK = b"\xef\xbb\xbf"
PIECE = 2**20
"""Bytes that are read of a file at once, while it is indexed."""
TSV: dict[str, Any] = {"delimiter": "\t", "quoting": csv.QUOTE_NONE}
"""Options of Python's csv module: in a .tsv, quotes are text too."""
END = "end"
"""A line that is put after those of a table: a quote that is still open swallows it."""
UTF8 = ("utf-8", "surrogateescape")
"""Bytes that are no UTF-8 are kept, so that the row with them can be named."""
SPACE = re.compile(r"[ \t\r\n]*")
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
    """Why a row is none, by place. It is in `rows` too, perhaps without columns."""


def index_lines(file: io.BufferedReader, start: int, _names: list[str]) -> Index:
    """Index a .jsonl file. Blank lines are no rows."""
    row, groups = _lines(file, start)
    return Index([*row], groups)


def _lines(file: io.BufferedReader, start: int) -> tuple[dict[str, Any], list[Group]]:
    """Return the last value of each column in the first group, and the groups."""
    values: dict[str, Any] = {}
    groups: list[Group] = []
    rows, first, position = 0, 1, start
    for number, line in enumerate(file, start=1):
        position += len(line)
        if line.strip(b" \t\r\n"):
            rows += 1
            if not groups:
                values |= parse_lines(line).rows[0]
        if rows == GROUP_ROWS:
            groups.append(Group(rows, position - start, start, position, first))
            rows, first, start = 0, number + 1, position
    if rows:
        groups.append(Group(rows, position - start, start, position, first))
    return values, groups


def parse_lines(data: bytes, _columns: Sequence[str] = ()) -> Parsed:
    """Return the rows of a .jsonl file's group."""
    parsed = Parsed([], [], {})
    for number, line in enumerate(data.decode(*UTF8).split("\n")):
        if line.strip(" \t\r\n"):
            parsed.lines.append(number)
            try:
                _add(parsed, json.loads(line))
            except (ValueError, RecursionError) as error:
                _add(parsed, {}, cause(error))
    return parsed


def _add(parsed: Parsed, row: Any, reason: str = "") -> None:
    if not isinstance(row, dict):
        row, reason = {}, f"but {type(row).__name__}"
    if reason:
        parsed.unreadable[len(parsed.rows)] = f"is no JSON object, {reason}"
    parsed.rows.append(row)


def index_json(file: io.BufferedReader, start: int, _names: list[str]) -> Index:
    """Index a .json file: a list of objects, which is read whole, or an object a line. Raise a ValueError if it is
    other JSON."""
    if file.peek(GROUP_ROWS).lstrip()[:1] != b"[":
        row, groups = _lines(file, start)
        is_table = sum(group.rows for group in groups) == 1 and all(isinstance(v, dict | list) for v in row.values())
        if groups and (is_table or not row):
            raise ValueError(NO_ROWS)
        return Index([*row], groups)
    text = file.read().decode(*UTF8)
    values = json.loads(text)
    columns = {name: None for row in values[:GROUP_ROWS] if isinstance(row, dict) for name in row}
    decode = json.JSONDecoder().raw_decode
    groups = []
    place = text.index("[") + 1
    position = start + len(text[:place].encode(*UTF8))
    for first in range(0, len(values), GROUP_ROWS):
        rows, begin = min(GROUP_ROWS, len(values) - first), place
        for _ in range(rows):
            _, end = decode(text, _after_space(text, place))
            place = _after_space(text, end) + 1  # after the comma
        size = len(text[begin:end].encode(*UTF8))
        groups.append(Group(rows, size, position, position + size, first + 1))
        position += len(text[begin:place].encode(*UTF8))
    return Index([*columns], groups)


def _after_space(text: str, place: int) -> int:
    found = SPACE.match(text, place)
    assert found  # it may be empty
    return found.end()


def parse_json(data: bytes, columns: Sequence[str]) -> Parsed:
    """Return the rows of a .json file's group."""
    parsed = Parsed([], [], {})
    try:
        values = json.loads(f"[{data.decode(*UTF8)}]")
    except ValueError:  # they are no elements of a list
        return parse_lines(data, columns)
    for number, value in enumerate(values):
        parsed.lines.append(number)
        _add(parsed, value)
    return parsed


def index_table(file: io.BufferedReader, start: int, names: list[str], **dialect: Any) -> Index:
    """Index a .csv or .tsv file, whose header are `names` or, where there are none, its first line that is not blank.
    Raise a ValueError if the header names a column twice."""
    position = start

    def lines() -> Iterator[str]:
        nonlocal position
        for line in io.TextIOWrapper(file, *UTF8, newline=""):
            position += len(line) if line.isascii() else len(line.encode(*UTF8))
            yield line

    reader = csv.reader(lines(), **dialect)
    columns = names or next(filter(None, reader), [])
    if twice := [name for name in columns if name and columns.count(name) > 1]:
        raise ValueError(f"two columns are called {twice[0]}")
    groups: list[Group] = []
    start, rows, last = position, 0, reader.line_num
    first, longest = last + 1, (1, 0)
    for cells in reader:
        longest = max(longest, (reader.line_num - last, last + 1))
        last = reader.line_num
        rows += bool(cells)  # else the line is blank
        if rows == GROUP_ROWS:
            groups.append(Group(rows, position - start, start, position, first))
            start, rows, first = position, 0, last + 1
    if rows:
        groups.append(Group(rows, position - start, start, position, first))
    height, line = longest
    note = f"{last:,} lines are {sum(g.rows for g in groups):,} rows, as cells in quotes go over several: "
    note += f"the longest row has lines {line:,} to {line + height - 1:,}"
    return Index(columns, groups, note if height > 1 else "")


def parse_table(data: bytes, columns: Sequence[str], **dialect: Any) -> Parsed:
    """Return the rows of a .csv or .tsv file's group. A row may have fewer cells than there are columns."""
    parsed = Parsed([], [], {})
    text = io.StringIO(data.decode(*UTF8), newline="")
    reader, line = csv.reader(chain(text, [END]), **dialect), 0
    for cells in reader:
        if cells:
            parsed.lines.append(line)
            if len(cells) > len(columns):
                parsed.unreadable[len(parsed.rows)] = f"has {len(cells)} cells for {len(columns)} columns"
            parsed.rows.append(dict(zip(columns, cells, strict=False)))
        line = reader.line_num
    if parsed.lines[-1] == reader.line_num - 1:
        del parsed.rows[-1], parsed.lines[-1]
    else:
        parsed.unreadable[len(parsed.rows) - 1] = "has a quote that is never closed"
    return parsed


def index_text(file: io.BufferedReader, start: int, _names: list[str]) -> Index:
    """Index a .txt file."""
    size = sum(map(len, iter(partial(file.read, PIECE), b"")))
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
