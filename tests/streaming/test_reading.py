"""Rows as their files have them: hostile files of each kind, loaded and, where they can be, streamed, against Python's
own csv and json modules and pyarrow. What is compared is what the tokenizer gets, cell by cell."""

import csv
import io
import json
import random
from collections.abc import Callable, Iterator
from contextlib import suppress
from datetime import datetime
from functools import partial
from itertools import islice, zip_longest
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from datasets import ClassLabel, Features, Value
from pyarrow import parquet

from src.tasks.streaming.cache import TokenCache
from src.tasks.streaming.index import EXTENSIONS, Source
from src.tasks.text.chats import ChatEncoder, as_tools
from src.tasks.text.files import find_files
from src.tasks.text.rows import BLOCK, label_text, require_text
from src.tasks.text.tokenizing import CHUNK_FEATURES
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
ARGUMENTS: list[Any] = ["2024-01-04", "01000", 1, 1.5, None, True, [], [1, "a"], {"unit": None}, {"at": "12:30"}, ""]
Row = tuple[str | None, ...]
Values = list[dict[str, Any] | None]
"""Rows as a file has them; None where one is unreadable."""


def texts(draw: random.Random, number: int) -> list[str]:
    """All alike, or of all kinds, or alike but for the last one."""
    kind = draw.random()
    if kind < 0.2:
        return [f"{draw.randrange(10**5):05}" for _ in range(number - 1)] + ["word"]
    if kind < 0.4:
        return [f"2024-{draw.randint(1, 12):02}-{draw.randint(1, 28):02}" for _ in range(number)]
    return ["word", *draw.choices(TEXTS, k=number - 1)]


def rows_in(draw: random.Random, seed: int) -> int:
    """Two files have more than 10,000: readers that guess do so by so many rows."""
    return 10_050 if seed in (7, 100) else draw.randint(1, 12)


def table(draw: random.Random, seed: int, delimiter: str) -> bytes:
    """A csv or tsv, as well or badly written as people's are."""
    ends, number = draw.choice(["\n", "\n", "\r\n", "\r"]), rows_in(draw, seed)
    header = draw.sample(["text", "label", "id"], 3)
    columns = {name: texts(draw, number) for name in header}
    lines = [delimiter.join(header)]
    for row in zip(*columns.values(), strict=True):
        cells = []
        for cell in row:
            if delimiter == "\t":
                cells.append(cell.replace("\t", " ").replace("\n", " ").replace("\r", " "))
            elif draw.random() < 0.2 or any(c in cell for c in ',"\r\n'):
                cells.append('"' + cell.replace('"', '""') + '"')
            else:
                cells.append(cell)
        if draw.random() < 0.05:
            cells = draw.choice([cells[:-1], [*cells, "more"], cells[:1]])
        lines.append(delimiter.join(cells))
        if draw.random() < 0.1:
            lines.append(draw.choice(["", "", " "]))
    if draw.random() < 0.2:  # a stray quote, which may swallow rows, or stay open
        place = draw.randrange(1, len(lines))
        head, _, tail = lines[place].rpartition(delimiter)
        mark = draw.choice(['"', 'a"b', '"a"b'])
        lines[place] = draw.choice([mark + lines[place], f"{head}{delimiter}{mark}{tail}"])
    return finished(draw, ends.join(lines) + draw.choice(["", ends, ends + ends]))


def finished(draw: random.Random, text: str) -> bytes:
    data = text.encode(*UTF8)
    if draw.random() < 0.05:  # a byte that is no UTF-8, but not in the header
        place = draw.randrange(len(data) // 2, len(data))
        data = data[:place] + b"\xe9" + data[place:]
    return MARK * (draw.random() < 0.1) + data


def json_rows(draw: random.Random, seed: int) -> list[dict[str, Any]]:
    number = rows_in(draw, seed)
    if seed % 3 == 0:
        rows = [{"messages": chat(draw), "tools": tools(draw)} for _ in range(number)]
    else:
        columns = {name: texts(draw, number) for name in ("text", "label", "id")}
        rows = [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]
        for row in rows[1:]:
            if draw.random() < 0.2:
                row[draw.choice([*row])] = draw.choice(OTHERS)
            if draw.random() < 0.1:
                del row[draw.choice([*row])]
    return [dict(draw.sample([*row.items()], len(row))) for row in rows]


def chat(draw: random.Random, typed: dict[str, Any] | None = None) -> list[dict[str, Any]]:
    """Messages in which each call has other arguments: of any type, or some of those that are given."""
    names = draw.sample(["date", "n", "city", "x"], draw.randint(0, 4))
    arguments = {name: typed[name] if typed else draw.choice(ARGUMENTS) for name in names}
    call = {"type": "function", "function": {"name": "book", "arguments": arguments}}
    answer = {"role": "assistant", "content": draw.choice(TEXTS), "tool_calls": [call] * draw.randint(1, 2)}
    return [{"role": "user", "content": draw.choice(TEXTS)}, answer]


def tools(draw: random.Random) -> Any:
    return draw.choice([None, [], [{"function": {"name": "book", "parameters": {"date": draw.choice(ARGUMENTS)}}}]])


def jsonl(draw: random.Random, seed: int) -> bytes:
    ends = draw.choice(["\n", "\n", "\r\n"])
    lines = []
    for place, row in enumerate(json_rows(draw, seed)):
        line = json.dumps(row, ensure_ascii=draw.random() < 0.5, separators=draw.choice([None, (",", ":")]))
        if place and draw.random() < 0.1:
            line = draw.choice([line[:-3], "[1]", "null", '"a"', '{"text": "half \\ud83d"}', line + line, "{}"])
        lines.append(" " * (draw.random() < 0.1) + line)
        if draw.random() < 0.15:
            lines.append(draw.choice(["", " ", "\t"]))
    return finished(draw, ends.join(lines) + draw.choice(["", ends, ends + ends]))


def json_list(draw: random.Random, seed: int) -> bytes:
    rows: list[Any] = json_rows(draw, seed)
    rows += [[1], "a", None, {}] if draw.random() < 0.2 else []
    indent, is_ascii = draw.choice([None, 1, 4]), draw.random() < 0.5
    return finished(draw, draw.choice(["", "\n"]) + json.dumps(rows, indent=indent, ensure_ascii=is_ascii))


def parquet_file(draw: random.Random, seed: int) -> bytes:
    number = rows_in(draw, seed)
    holes = [draw.choice([text, text, text, None]) for text in texts(draw, number)]
    kinds: list[Callable[[], pa.Array]] = [
        lambda: pa.array(holes, draw.choice([pa.string(), pa.large_string()])),
        lambda: pa.array([hole or "word" for hole in holes]).dictionary_encode(),
        lambda: pa.array([draw.randrange(9) for _ in holes], draw.choice([pa.int8(), pa.int64(), pa.float32()])),
        lambda: pa.array([datetime(2024, 1, draw.randint(1, 28)) for _ in holes], draw.choice([pa.date32(), None])),
        lambda: pa.array([draw.random() < 0.5 for _ in holes]),
        lambda: pa.array([b"\xff" for _ in holes]),
    ]
    columns: dict[str, pa.Array] = {"text": draw.choice(kinds[:2])(), "label": draw.choice(kinds)()}
    if seed % 3 == 0:
        columns = {
            "messages": pa.array([chat(draw, TYPED) for _ in holes], CHATS),
            "tools": pa.nulls(number, pa.string()),
        }
    made = pa.table({**columns, "id": draw.choice(kinds)()})
    if seed % 3 == 1:
        made = made.set_column(1, "label", pa.array([draw.randint(-1, 2) for _ in holes], pa.int64()))
        features = Features({"label": ClassLabel(names=["no", "yes", "2024-01-04"]), "text": Value("string")})
        made = made.replace_schema_metadata(features.arrow_schema.metadata)
    sink = pa.BufferOutputStream()
    parquet.write_table(made, sink, row_group_size=draw.choice([number // 3 + 1, 1000, 20_000]))
    return sink.getvalue().to_pybytes()


TYPED = {"date": "2024-01-04", "n": 1, "city": "01000", "x": 1.5}
ARGUMENT_TYPES = pa.struct({"date": pa.string(), "n": pa.int64(), "city": pa.string(), "x": pa.float64()})
CALLS = pa.list_(pa.struct({
    "type": pa.string(), "function": pa.struct({"name": pa.string(), "arguments": ARGUMENT_TYPES})
}))  # fmt: skip
CHATS = pa.list_(pa.struct({"role": pa.string(), "content": pa.string(), "tool_calls": CALLS}))
"""Parquet has one type for all rows: its arguments are of these."""


def usable(row: dict[str, Any] | None) -> Row | None:
    """What is kept of a row with these values; None: it cannot be used."""
    if row is None:
        return None
    if "messages" in row:
        kept = json.dumps(row["messages"]), json.dumps(row.get("tools") or None)
        return kept if is_unicode([row["messages"], row.get("tools")]) else None
    text, label = row.get("text"), row.get("label")
    if not isinstance(text, str) or not isinstance(label, str | int | float) or label != label:
        return None
    if not text.strip() or not str(label).strip() or not is_unicode([text, label]):
        return None
    if isinstance(label, bool) or (isinstance(label, float) and label.is_integer()):
        label = int(label)  # equal numbers are one label
    return text, str(label).strip()


def is_unicode(value: Any) -> bool:
    """Without half an emoji, and what bytes that are no UTF-8 were read as."""
    return not any("\ud800" <= c <= "\udfff" for c in json.dumps(value, ensure_ascii=False))


def of_table(data: bytes, **dialect: Any) -> Values:
    text = data.removeprefix(MARK).decode(*UTF8)
    header, *rows = [cells for cells in csv.reader(io.StringIO(text, newline=""), **dialect) if cells]
    more = [cells for cells in csv.reader([*io.StringIO(text, newline=""), "x"], **dialect) if cells]
    found = [dict(zip(header, cells, strict=False)) if len(cells) <= len(header) else None for cells in rows]
    if more[-1] != ["x"] or len(more) < len(rows) + 2:  # its last quote is never closed
        found[-1] = None
    return found


def of_lines(data: bytes) -> Values:
    found = []
    for line in data.removeprefix(MARK).split(b"\n"):
        if line.strip(b" \t\r"):
            try:
                row = json.loads(line.decode(*UTF8))
            except ValueError:
                row = None
            found.append(row if isinstance(row, dict) else None)
    return found


def of_list(data: bytes) -> Values:
    rows = json.loads(data.removeprefix(MARK).decode(*UTF8))
    return [row if isinstance(row, dict) else None for row in rows]


def of_parquet(data: bytes) -> Values:
    made = parquet.read_table(pa.BufferReader(data))
    names = ["no", "yes", "2024-01-04"] if made.schema.metadata else []
    rows: Values = made.to_pylist()
    for row in filter(None, rows):
        if names and 0 <= row["label"] < len(names):
            row["label"] = names[row["label"]]
        for message in row.get("messages", []):  # a null of a struct is a key that only other rows have
            for call in message["tool_calls"] or []:
                function = call["function"]
                function["arguments"] = {k: v for k, v in function["arguments"].items() if v is not None}
            if message["tool_calls"] is None:
                del message["tool_calls"]
    return rows


KINDS: dict[str, tuple[Callable[[random.Random, int], bytes], Callable[[bytes], Values]]] = {
    "csv": (partial(table, delimiter=","), of_table),
    "tsv": (partial(table, delimiter="\t"), partial(of_table, delimiter="\t", quoting=csv.QUOTE_NONE)),
    "jsonl": (jsonl, of_lines),
    "json": (json_list, of_list),
    "parquet": (parquet_file, of_parquet),
}


class Recording:
    """Stands for a tokenizer: keeps the rows that it gets, and has a token for each."""

    def __init__(self, columns: dict[str, Any]) -> None:
        self.columns = dict(zip(columns, columns, strict=True))
        self.rows: list[Row] = []

    def chunks(self, rows: dict[str, list[Any]]) -> pa.Table:
        self.rows += zip(*rows.values(), strict=True)
        number = len(next(iter(rows.values())))
        chunk = {"input_ids": [7], "labels": [7], "length": 1}
        return pa.Table.from_pylist([{**chunk, "row": i} for i in range(number)], CHUNK_FEATURES.arrow_schema)


def read(folder: Path, has_chats: bool, streaming: bool) -> tuple[list[Row], int]:
    """The rows of all files in the folder that the tokenizer gets, in their order; and how many others there are."""
    columns: Any = {"text": require_text, "label": label_text}
    if has_chats:
        columns = {"messages": ChatEncoder(""), "tools": as_tools}
    if not streaming:
        task = tiny.task(dataset=str(folder), bad_rows="skip", eval_from="all")
        table, _ = task.usable_parts(task.open_rows(), columns)
        rows = [*zip(*(table[name][:] for name in columns), strict=True)]
        return rows, task._skipped_rows["train"]
    tokenizer: Any = Recording(columns)
    source, cache = Source(find_files(str(folder)), BLOCK, columns), TokenCache(columns, tokenizer, True, 1.0)
    for number in range(len(source.rows)):
        cache._make(source[number])
    return tokenizer.rows, int(source.rows.sum()) - len(tokenizer.rows)


def differences(kind: str, seeds: range, folder: Path) -> Iterator[str]:
    """What is wrong of the files of these seeds, loaded or streamed, which have the same columns."""
    rows: list[Row | None] = []
    make, read_plainly = KINDS[kind]
    for seed in seeds:
        draw = random.Random(f"{kind} {seed}")
        for number in range(1 if seed % 2 else 2):
            data = make(draw, seed)
            with suppress(ValueError):  # a list that is no JSON is refused as a whole, as is a file of no usable row
                found = [usable(row) for row in read_plainly(data)]
                if any(found):
                    rows += found
                    tiny.write({f"{folder}/{seed:03}-{number}.{kind}": data})
    expected = [row for row in rows if row]
    has_chats = kind != "csv" and kind != "tsv" and seeds[0] % 3 == 0
    for streaming in {False, f".{kind}" in EXTENSIONS}:
        kept, bad = read(folder, has_chats, streaming)
        if has_chats:
            kept = [tuple(json.dumps(json.loads(cell or "null")) for cell in row) for row in kept]
        pairs = enumerate(zip_longest(kept, expected))
        yield from (f"{place}: {ours}, but it is {theirs}" for place, (ours, theirs) in pairs if ours != theirs)
        if bad != rows.count(None):
            yield f"{bad} rows cannot be used, but it is {rows.count(None)}"


@pytest.mark.parametrize("kind", KINDS)
def test_each_value_is_what_the_file_says(kind: str) -> None:
    """In 300 hostile files of each kind, loaded and streamed. Tried with pandas' reader of csv, whose guesses change
    values, with pyarrow's of JSON, which makes times of strings, and with a blank line that is a row."""
    for first in range(3):
        found = [*islice(differences(kind, range(first, FILES, 3), Path(f"{first}")), 10)]
        assert not found, found
