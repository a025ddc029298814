"""Each value is what its file says: hostile files of each kind, cell by cell as Python's csv and json modules and
pyarrow read them. What is compared is what the tokenizer gets. tests/streaming reads the same files as streams."""

import csv
import io
import json
import random
from collections.abc import Callable
from contextlib import suppress
from datetime import datetime
from functools import partial
from itertools import zip_longest
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from datasets import ClassLabel, Features
from pyarrow import parquet

from src.tasks.text.rows import Encoders, label_text, read_file, require_text
from tests.text import tiny

FILES = 300
"""Of each kind."""
UTF8 = ("utf-8", "surrogateescape")
MARK = b"\xef\xbb\xbf"
TEXTS = [
    "2024-01-04", "2024-01-04 00:00:00", "2024-01-04T12:30:00Z", "12:30", "00123", "01000", "1.10", "1.1", "2.0",
    "1e2", "100", "2E1", "1_000", "0x1F", "-0", "+1", "inf", "1,000", "NA", "N/A", "None", "none", "null", "NaN", "nan",
    "True", "FALSE", "yes", "", " ", "  padded ", "word", "two words", "café", "😀", "a\nb", "a\r\nb", "a\rb", "a\tb",
    'say "hi"', '"', '""', "'", "a;b", "# no comment", "=1+1", "\ufeffmark", "\u2028", "\x0b\x0c", "\x1c", "\xa0",
    "\\N", "\\", "[1, 2]", '{"a": 1}', "end", "<s>",
]  # fmt: skip
OTHERS: list[Any] = [None, 0, 7, 1.5, -1, True, [], ["a"], {"a": 1}]
COLUMNS: Encoders = {"text": require_text, "label": label_text}
Row = tuple[str | None, ...]
Values = list[dict[str, Any] | None]
"""Rows as a file has them; None for one that is unreadable."""
Read = Callable[[Path], tuple[list[Row], int]]
"""Returns the rows of a folder's files as the tokenizer gets them, and the number of those that are skipped."""


# -------------------------------------------------------------------------------------------------------------- files
def texts(draw: random.Random, number: int) -> list[str]:
    """Return texts that are alike but for the last one, all alike, or of all kinds."""
    kind = draw.random()
    if kind < 0.2:
        return [f"{draw.randrange(10**5):05}" for _ in range(number - 1)] + ["word"]
    if kind < 0.4:
        return [f"2024-{draw.randint(1, 12):02}-{draw.randint(1, 28):02}" for _ in range(number)]
    return ["word", *draw.choices(TEXTS, k=number - 1)]


def num_rows(draw: random.Random, seed: int) -> int:
    """Two files have more than 10,000 rows: readers that guess types do so by as many."""
    return 10_050 if seed in (7, 100) else draw.randint(1, 12)


def table(draw: random.Random, seed: int, delimiter: str) -> bytes:
    """Return a csv or tsv, as well or badly written as people's are."""
    end, number = draw.choice(["\n", "\n", "\r\n", "\r"]), num_rows(draw, seed)
    header = draw.sample(["text", "label", "id"], 3)
    lines = [delimiter.join(header)]
    for cells in zip(*(texts(draw, number) for _ in header), strict=True):
        row = [written(draw, cell, delimiter) for cell in cells]
        if draw.random() < 0.05:
            row = draw.choice([row[:-1], [*row, "more"], row[:1]])
        lines.append(delimiter.join(row))
        if draw.random() < 0.1:
            lines.append(draw.choice(["", "", " "]))
    if draw.random() < 0.2:  # a stray quote, which may swallow rows, or stay open
        place = draw.choice([draw.randrange(1, len(lines)), len(lines) - 1])
        head, _, tail = lines[place].rpartition(delimiter)
        mark = draw.choice(['"', 'a"b', '"a"b'])
        lines[place] = draw.choice([mark + lines[place], f"{head}{delimiter}{mark}{tail}"])
    return finished(draw, lines, end)


def written(draw: random.Random, cell: str, delimiter: str) -> str:
    if delimiter == "\t":
        return cell.replace("\t", " ").replace("\n", " ").replace("\r", " ")
    is_quoted = draw.random() < 0.2 or any(c in cell for c in ',"\r\n')
    return '"' + cell.replace('"', '""') + '"' if is_quoted else cell


def finished(draw: random.Random, lines: list[str], end: str) -> bytes:
    data = (end.join(lines) + draw.choice(["", end, end + end])).encode(*UTF8)
    if draw.random() < 0.05:  # a byte that is not UTF-8, but not in the header
        place = draw.randrange(len(data) // 2, len(data))
        data = data[:place] + b"\xe9" + data[place:]
    return MARK * (draw.random() < 0.1) + data


def json_rows(draw: random.Random, seed: int) -> list[dict[str, Any]]:
    columns = [texts(draw, num_rows(draw, seed)) for _ in range(3)]
    rows: list[dict[str, Any]] = [
        dict(zip(("text", "label", "id"), row, strict=True)) for row in zip(*columns, strict=False)
    ]
    for row in rows[1:]:
        if draw.random() < 0.2:
            row[draw.choice([*row])] = draw.choice(OTHERS)
        if draw.random() < 0.1:
            del row[draw.choice([*row])]
    return [dict(draw.sample([*row.items()], len(row))) for row in rows]


def jsonl(draw: random.Random, seed: int) -> bytes:
    end, lines = draw.choice(["\n", "\n", "\r\n"]), []
    for place, row in enumerate(json_rows(draw, seed)):
        line = json.dumps(row, ensure_ascii=draw.random() < 0.5, separators=draw.choice([None, (",", ":")]))
        if place and draw.random() < 0.1:
            line = draw.choice([line[:-3], "[1]", "null", '"a"', '{"text": "half \\ud83d"}', line + line, "{}"])
        lines.append(" " * (draw.random() < 0.1) + line)
        if draw.random() < 0.15:
            lines.append(draw.choice(["", " ", "\t"]))
    return finished(draw, lines, end)


def json_list(draw: random.Random, seed: int) -> bytes:
    rows: list[Any] = json_rows(draw, seed)
    rows += [[1], "a", None, {}] if draw.random() < 0.2 else []
    text = json.dumps(rows, indent=draw.choice([None, 1, 4]), ensure_ascii=draw.random() < 0.5)
    return finished(draw, [*draw.choice([[], [""]]), text], "\n")


NAMES = ["no", "yes", "2024-01-04"]


def parquet_file(draw: random.Random, seed: int) -> bytes:
    number = num_rows(draw, seed)
    holes = [draw.choice([text, text, text, None]) for text in texts(draw, number)]
    kinds: list[Callable[[], pa.Array]] = [
        lambda: pa.array(holes, draw.choice([pa.string(), pa.large_string()])),
        lambda: pa.array([hole or "word" for hole in holes]).dictionary_encode(),
        lambda: pa.array([draw.randrange(9) for _ in holes], draw.choice([pa.int8(), pa.int64(), pa.float32()])),
        lambda: pa.array([datetime(2024, 1, draw.randint(1, 28)) for _ in holes], draw.choice([pa.date32(), None])),
        lambda: pa.array([draw.random() < 0.5 for _ in holes]),
        lambda: pa.array([b"\xff" for _ in holes]),
    ]
    labels = draw.choice(kinds)()
    names = Features({"label": ClassLabel(names=NAMES)}).arrow_schema.metadata if seed % 3 == 0 else None
    if names:
        labels = pa.array([draw.randint(-1, 2) for _ in holes], pa.int64())
    made = pa.table({"text": draw.choice(kinds[:2])(), "label": labels, "id": draw.choice(kinds)()}, metadata=names)
    sink = pa.BufferOutputStream()
    parquet.write_table(made, sink, row_group_size=draw.choice([number // 3 + 1, 1000, 20_000]))
    return sink.getvalue().to_pybytes()


# ----------------------------------------------------------------------------------------------------- what they say
def of_table(data: bytes, **dialect: Any) -> Values:
    text = data.removeprefix(MARK).decode(*UTF8)
    header, *rows = [cells for cells in csv.reader(io.StringIO(text, newline=""), **dialect) if cells]
    more = [cells for cells in csv.reader([*io.StringIO(text, newline=""), "x"], **dialect) if cells]
    found = [dict(zip(header, cells, strict=False)) if len(cells) <= len(header) else None for cells in rows]
    if more[-1] != ["x"] or len(more) < len(rows) + 2:  # its last quote is never closed
        found[-1] = None
    return found


def of_lines(data: bytes) -> Values:
    found: Values = []
    for line in data.removeprefix(MARK).split(b"\n"):
        if line.strip(b" \t\r"):
            found.append(None)
            with suppress(ValueError):
                found[-1:] = rows_only([json.loads(line.decode(*UTF8))])
    return found


def rows_only(values: list[Any]) -> Values:
    return [value if isinstance(value, dict) else None for value in values]


def of_list(data: bytes) -> Values:
    return rows_only(json.loads(data.removeprefix(MARK).decode(*UTF8)))


def of_parquet(data: bytes) -> Values:
    made = parquet.read_table(pa.BufferReader(data))
    rows = made.to_pylist()
    for row in rows if made.schema.metadata else ():
        if 0 <= row["label"] < len(NAMES):
            row["label"] = NAMES[row["label"]]
    return rows


def usable(row: dict[str, Any] | None) -> Row | None:
    """Return what is kept of a row with these values; None if it cannot be used."""
    if row is None:
        return None
    text, label = row.get("text"), row.get("label")
    if not isinstance(text, str) or not isinstance(label, str | int | float) or label != label:
        return None
    if not text.strip() or not str(label).strip() or not is_unicode([text, label]):
        return None
    if isinstance(label, bool) or (isinstance(label, float) and label.is_integer()):
        label = int(label)  # equal numbers are one label
    return text, str(label).strip()


def is_unicode(value: Any) -> bool:
    """Return whether there is no half of an emoji, nor what bytes that are not UTF-8 are read as."""
    return not any("\ud800" <= c <= "\udfff" for c in json.dumps(value, ensure_ascii=False))


KINDS: dict[str, tuple[Callable[[random.Random, int], bytes], Callable[[bytes], Values]]] = {
    "csv": (partial(table, delimiter=","), of_table),
    "tsv": (partial(table, delimiter="\t"), partial(of_table, delimiter="\t", quoting=csv.QUOTE_NONE)),
    "jsonl": (jsonl, of_lines),
    "json": (json_list, of_list),
    "parquet": (parquet_file, of_parquet),
}


def assert_read_as_written(kind: str, read: Read) -> None:
    """Assert that `read` returns each usable row of hostile files, in their order, and skips the others."""
    make, read_plainly = KINDS[kind]
    rows: list[Row | None] = []
    for seed in range(FILES):
        data = make(random.Random(f"{kind} {seed}"), seed)
        with suppress(ValueError):  # a list that is not JSON is refused as a whole, as is a file of no usable row
            found = [usable(row) for row in read_plainly(data)]
            if any(found):
                rows += found
                tiny.write({f"files/{seed:03}.{kind}": data})
    kept, skipped = read(Path("files"))
    expected = [row for row in rows if row]
    assert [pair for pair in zip_longest(kept, expected) if pair[0] != pair[1]][:9] == []
    assert skipped == rows.count(None)


def load(folder: Path) -> tuple[list[Row], int]:
    task = tiny.task(dataset=str(folder), bad_rows="skip", eval_from="all")
    rows, _ = task.usable_parts(task.open_rows(), COLUMNS)
    return [*zip(*(rows[name][:] for name in COLUMNS), strict=True)], task._skipped_rows["train"]


@pytest.mark.parametrize("kind", KINDS)
def test_each_value_is_what_the_file_says(kind: str) -> None:
    assert_read_as_written(kind, load)


def test_each_row_of_a_parquet_has_its_own_keys_alone() -> None:
    """A parquet has one type for all calls of tools, in which the keys of the others are null."""
    calls = [{"function": {"name": "book", "arguments": arguments}} for arguments in ({"date": "2024-01-04"}, {"n": 1})]
    rows = [{"messages": [{"role": "assistant", "tool_calls": [call]}]} for call in calls]
    assert [record.row for record in read_file(tiny.write({"a.parquet": rows}))] == rows
