"""Rows of data files, local or remote, and of tables, exactly as they are written.

A JSON value is what Python's json module reads, a csv or tsv cell is text, as its csv module reads it, and a .txt is
one document. Nothing is guessed: 1.10 and 001 stay as they are, a date is text, "NA" and "null" are words. There is one
generator for each kind of file; `datasets` caches the columns that are used, encoded as text.
"""

import csv
import hashlib
import json
import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain, islice, repeat, starmap
from pathlib import Path
from typing import Any, NamedTuple, TextIO

import datasets
import fsspec
import numpy as np
import pyarrow as pa
from datasets import ClassLabel, Dataset, Features, Json, List, Value
from datasets.exceptions import DatasetGenerationError
from datasets.fingerprint import Hasher
from pyarrow import parquet

from src.config.errors import UserError, cause, raise_if_any, reraised_as
from src.config.terminal import bar
from src.tasks.text.files import attempts

Row = dict[str, Any]
"""A row's values by column."""
Batch = dict[str, Any]
"""A batch, as a task's `collate` returns it."""
Rows = dict[str, list[Any]]
"""Values of rows, by column."""


class Record(NamedTuple):
    """Holds a row as its file has it."""

    number: int
    """Its first line in the file, or, for kinds without lines, its own number; both from 1 on."""
    row: Row
    reason: str = ""
    """Why it cannot be used, if so."""
    lines: int = 1


class Note(NamedTuple):
    """Holds what is noted about a row that cannot be used, or has several lines."""

    place: str
    reason: str
    """Why it cannot be used; empty if it can."""
    lines: int


Encoders = Mapping[str, Callable[[Any], str | None]]
"""Encoders of the columns in use, by column: each returns a value as the text to keep, or raises a ValueError that says
why it cannot be used. If one accepts None, its column may be missing."""
ROW = "the row as text"
"""Name of a last column that no file has. Its encoder gets the values of the others, encoded, by column, and what it
returns is all that is kept of them."""
NOTE = "what is noted about this row"
"""Name of a column that is added to those of the data: a Note as JSON, or null."""
CODE = [file.read_bytes() for file in sorted(Path(__file__).parent.rglob("*.py"))]
"""The source code that makes the cached tables: when it changes, they are made again."""
BLOCK = 1024
"""Rows that are read or tokenized together, and rows of a file that its columns are taken from."""
WRITTEN_TOGETHER = 100
"""Rows that are kept in memory until they are written: a row may be a book."""
ENCODING = "utf-8-sig"
"""UTF-8, with or without a byte order mark."""
END = '\ud800"'
"""A line after a table's own, which begins as no UTF-8 does: a quote that is still open swallows it, and is closed."""
NO_ROWS = 'one object, not rows: write a list of objects, or one per line (pandas: orient="records", lines=True)'
csv.field_size_limit(2**31 - 1)


def require_text(value: Any) -> str:
    """Return a text as it is. Raise a ValueError if the value is empty or not text."""
    if not isinstance(value, str | None):
        raise ValueError(f"is {type(value).__name__}, not text")
    if not value or value.isspace():
        raise ValueError("is empty")
    return encodable(value)


def label_text(value: Any) -> str:
    """Return a label, a number or text, as text without surrounding whitespace; equal numbers, such as 1, 1.0 and true,
    as the same text. Raise a ValueError if it is neither."""
    if isinstance(value, int | float) and value == value:  # NaN is no number
        return str(int(value) if value % 1 == 0 else value)
    return require_text(value).strip()


def as_json(value: Any) -> str:
    """Return a value as JSON. Raise a ValueError if it cannot be encoded."""
    with reraised_as(ValueError, "is not JSON: ", (TypeError, RecursionError)):
        return encodable(json.dumps(value, ensure_ascii=False))


def encodable(text: str) -> str:
    """Return the text. Raise a ValueError if it has half an emoji, or bytes that are not UTF-8, which tokenizers
    reject."""
    try:  # `as_user_error` would take eight times as long
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"is not valid Unicode: {cause(error)}") from error
    return text


def encode_row(row: Row, reason: str, encoders: Encoders) -> tuple[Row, str]:
    """Return the text to keep of a row, by column, and why it cannot be used, if so: the `reason` that is known
    already, or an encoder's."""
    encoded: Row = {}
    for name, encode in {} if reason else encoders.items():
        try:
            encoded[name] = encode(row.get(name, encoded if name == ROW else None))
        except ValueError as error:
            return {}, str(error) if name == ROW else f"{name} {error}"
    return {ROW: encoded[ROW]} if ROW in encoded else encoded, reason


def read_file(url: str, columns: Sequence[str] | None = None, header: Sequence[str] = ()) -> Iterator[Record]:
    """Yield the rows of a file; of a .parquet only these columns (None: all). `header` has the columns of a .csv or
    .tsv without one. If reading fails, go on with another try. Raise a UserError that names the file if it cannot be
    read."""
    suffix, done = Path(url).suffix.lower(), 0
    mode, newline = "rb" if suffix == ".parquet" else "r", "" if suffix in (".csv", ".tsv") else "\n"
    for attempt in attempts(url):
        # bytes that are not UTF-8 are kept, so that messages can name their row
        with attempt, fsspec.open(url, mode, encoding=ENCODING, errors="surrogateescape", newline=newline) as stream:
            if mode == "r":
                if {*stream.read(2)} & {"\0", "\udcfe"}:  # the bytes 0 and 0xfe: one of a byte order mark's two
                    raise ValueError("its text is UTF-16: save it as UTF-8")
                stream.seek(0)
            for record in islice(READERS[suffix](stream, columns, header), done, None):
                done += 1
                yield record
            return


def read_jsonl(lines: Iterable[str], *_: Any) -> Iterator[Record]:
    """Yield the rows of a .jsonl file, ignoring blank lines."""
    for number, line in enumerate(lines, start=1):
        text = line.strip(" \t\r\n")
        if text:
            try:
                yield as_record(number, json.loads(text))
            except (ValueError, RecursionError) as error:
                yield Record(number, {}, f"is not a JSON object: {cause(error)}")


def as_record(number: int, value: Any) -> Record:
    """Return a JSON value as a row."""
    if isinstance(value, dict):
        return Record(number, value)
    return Record(number, {}, f"is not a JSON object: found {type(value).__name__}")


def read_json(text: TextIO, *_: Any) -> Iterator[Record]:
    """Yield the rows of a .json file: a list of objects, which is read whole, or one object per line. Raise a
    ValueError for any other JSON."""
    first = next((line for line in text if not line.isspace()), "")
    if first.lstrip().startswith("["):
        return starmap(as_record, enumerate(json.loads(first + text.read()), start=1))
    records = read_jsonl(chain([first], text))
    head = [*islice(records, BLOCK)]
    rows = [record.row for record in head]
    if rows and (not any(rows) or (len(rows) == 1 and all(isinstance(v, dict | list) for v in rows[0].values()))):
        raise ValueError(NO_ROWS)
    return (record._replace(number=number) for number, record in enumerate(chain(head, records), start=1))


def read_csv(text: TextIO, _: Any, header: Sequence[str], **dialect: Any) -> Iterator[Record]:
    """Yield the rows of a .csv file, which may have fewer cells than there are columns. Its header is `header` or, if
    that is empty, the first line that is not blank. Raise a ValueError if a column is named twice."""
    reader = csv.reader(chain(text, [END]), **dialect)
    names, number = [*header], 1
    require_distinct(names)
    for cells in reader:
        lines = reader.line_num + 1 - number
        if cells == [END]:
            return
        if cells and not names:
            names = cells
            require_distinct(names)
        elif cells:
            reason = f"has {len(cells)} cells for {len(names)} columns" if len(cells) > len(names) else ""
            if cells[-1].endswith(END[0]):
                reason, lines = "has a quote that is never closed", lines - 1
            yield Record(number, dict.fromkeys(names) | dict(zip(names, cells, strict=False)), reason, lines)
        number += lines


def require_distinct(names: list[str]) -> None:
    """Raise a ValueError if a column is named twice."""
    for name, count in Counter(names).items():
        if name and count > 1:
            raise ValueError(f"two columns are called {name}")


def read_txt(text: TextIO, *_: Any) -> Iterator[Record]:
    """Yield a .txt file as a row, unless it is empty."""
    if document := text.read():
        yield Record(1, {"text": document})


def read_parquet(stream: Any, columns: Sequence[str] | None, *_: Any) -> Iterator[Record]:
    """Yield the rows of a .parquet file, with these columns if it has them."""
    file = parquet.ParquetFile(stream)
    schema = file.schema_arrow
    require_distinct(schema.names)
    own = [name for name in schema.names if columns is None or name in columns]
    return read_batches(file.iter_batches(BLOCK, columns=own), declared_features(schema))


READERS: dict[str, Callable[..., Iterator[Record]]] = {
    ".txt": read_txt,
    ".jsonl": read_jsonl,
    ".json": read_json,
    ".csv": read_csv,
    ".tsv": partial(read_csv, delimiter="\t", quoting=csv.QUOTE_NONE),  # quotes are plain text
    ".parquet": read_parquet,
}


def place_of(name: str, number: int) -> str:
    """Return the name of a file's line or row for messages."""
    return f"{name}, {'line' if name.lower().endswith(('.jsonl', '.csv', '.tsv')) else 'row'} {number}"


def declared_features(schema: pa.Schema) -> Features:
    """Return the features that `datasets` wrote into a parquet file; none if something else wrote it. Raise a
    ValueError if they are damaged, or of a kind that is not known here."""
    with reraised_as(ValueError, "its metadata are not those of `datasets`: "):
        written = json.loads((schema.metadata or {}).get(b"huggingface", b"{}"))
        return Features.from_dict(written.get("info", {}).get("features") or {})


def read_batches(batches: Iterable[Any], features: Mapping[str, Any], number: int = 1) -> Iterator[Record]:
    """Yield the rows of Arrow tables, of which the first has this number."""
    for batch in batches:
        names = batch.schema.names
        columns = [decoded_column(batch[name], features.get(name)) for name in names]
        for values in zip(*columns, strict=True) if names else repeat((), batch.num_rows):
            row = dict(zip(names, values, strict=True))
            errors = (f"{name} cannot be read: {value}" for name, value in row.items() if isinstance(value, Exception))
            yield Record(number, row, next(errors, ""))
            number += 1


def decoded_column(values: Any, feature: Any) -> Iterator[Any]:
    """Yield a column's values; an exception in place of one that cannot be read."""
    for value in values:
        try:
            yield decode_value(value.as_py(), feature)
        except (ArithmeticError, ValueError, RecursionError) as error:  # a date beyond the year 9999
            yield error


def decode_value(value: Any, feature: Any) -> Any:
    """Return a table's value with names in place of label ids, if the table declares them, and without the nulls that
    stand for keys of other rows."""
    if isinstance(feature, Json) and isinstance(value, str):
        return json.loads(value)
    if isinstance(feature, ClassLabel) and isinstance(value, int) and 0 <= value < feature.num_classes:
        return feature.names[value]  # a number without a name, such as -1 for unknown, stays a number
    if isinstance(value, dict):
        inner = feature if isinstance(feature, dict) else {}
        return {key: decode_value(part, inner.get(key)) for key, part in value.items() if part is not None}
    if isinstance(value, list):
        return [decode_value(part, getattr(feature, "feature", None)) for part in value]
    return value


@dataclass(frozen=True)
class Split:
    """Locates the rows of a split, which are read when they are needed."""

    dataset: str
    files: dict[str, str]
    """Each with its version."""
    read: Callable[[str, Sequence[str]], Iterator[Record]]
    """Yields the rows of a file, with these columns if it has them."""
    column_names: list[str]
    """The columns of the first file that has rows."""
    version: Any
    """Changes with the content."""


def open_files(files: dict[str, str], header: Sequence[str], dataset: str) -> Split:
    """Return the split that these files are, given with their versions. Raise a UserError if none has rows, or that
    names those that cannot be read."""
    read = partial(read_file, header=header)

    def names() -> Iterator[Row]:
        mistakes: list[str] = []
        for file in files:
            try:
                if head := [*islice(read(file), BLOCK)]:
                    yield {"names": json.dumps(columns_of(head))}  # they may have bytes that are not UTF-8
                    return
            except UserError as error:
                mistakes += error.args
        raise UserError(*mistakes or [f"task.dataset={dataset}: its files ({len(files)}) have no rows"])

    (found,) = cached_table(names, [files, header])
    return Split(dataset, files, read, json.loads(found["names"]), [files, header])


def columns_of(records: Iterable[Record]) -> list[str]:
    """Return the columns that these rows have."""
    return [*dict.fromkeys(name for record in records for name in record.row)]


def content_digest(file: str) -> str:
    """Return the SHA-256 of a file."""
    with open(file, "rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def write_parquet(table: Dataset, name: str) -> str:
    """Return a .parquet file with the rows of a table, in the cache, whose name begins with `name`."""
    file = Path(datasets.config.HF_DATASETS_CACHE, f"{name.replace('/', '--')}-{table._fingerprint}.parquet")
    if not file.exists():
        unfinished = file.with_suffix(f".{os.getpid()}")
        table.to_parquet(unfinished, batch_size=BLOCK)
        unfinished.replace(file)
    return str(file)


def missing_columns(encoders: Encoders, names: Iterable[str]) -> str:
    """Return the columns with these encoders that are not among the names, joined by nor. An encoder that takes None
    does without."""
    missing, known = [], {ROW, *names}
    for name, encode in encoders.items():
        if name not in known:
            try:
                encode(None)
            except ValueError:
                missing.append(name)
    return " nor ".join(missing)


def require_file_columns(encoders: Encoders, names: Iterable[str], file: str) -> None:
    """Raise a UserError if a file with these columns lacks one."""
    if missing := missing_columns(encoders, names):
        raise UserError(f"{file}: no column {missing}, which other files have")


def text_rows(split: Split, encoders: Encoders, desc: str) -> Dataset:
    """Return all rows of a split as a table of text, with a column NOTE. Later calls, even in another process, read it
    from the cache. Raise a UserError that names all files that cannot be read."""
    features = Features(dict.fromkeys([*([ROW] if ROW in encoders else encoders), NOTE], Value("string")))

    def rows() -> Iterator[Row]:
        mistakes: list[str] = []
        with bar(desc, total=None) as progress:
            for file in split.files:
                try:
                    records = split.read(file, [*encoders])
                    head = [*islice(records, BLOCK)]
                    if head:
                        require_file_columns(encoders, columns_of(head), file)
                    for number, row, reason, lines in chain(head, () if mistakes else records):
                        progress.update()
                        encoded, reason = encode_row(row, reason, encoders)
                        if reason or lines > 1:
                            encoded[NOTE] = json.dumps(Note(place_of(file, number), reason, lines))
                        yield dict.fromkeys(features) | encoded
                except UserError as error:
                    mistakes += error.args
        raise_if_any(mistakes)

    return cached_table(rows, [split.version, encoders], features)


def notes_of(table: Dataset) -> dict[int, Note]:
    """Return the notes in a table from `text_rows`, by row."""
    notes = table.data.column(NOTE)
    noted = np.flatnonzero(notes.is_valid().to_numpy())
    return {row: Note(*json.loads(notes[row].as_py())) for row in noted.tolist()}


def cached_table(rows: Callable[[], Iterator[Row]], key: Any, features: Features | None = None) -> Dataset:
    """Return a table of these rows. Later calls, even in another process, read it from the cache, as long as the key
    and CODE are the same."""
    try:
        return Dataset.from_generator(
            rows, features, fingerprint=Hasher.hash([key, CODE]), writer_batch_size=WRITTEN_TOGETHER
        )
    except DatasetGenerationError as error:
        raise error.__cause__ or error from None


def cached_map(rows: Dataset, function: Callable[..., Rows], desc: str, **options: Any) -> Dataset:
    """Return what `function` makes of batches of all columns. Later calls, even in another process, read it from the
    cache, as long as the rows, the function with its arguments (a partial's, or its object's fields) and CODE are the
    same."""
    key = Hasher.hash([rows._fingerprint, function, CODE])
    names = rows.column_names
    with bar(desc, total=len(rows)) as progress:

        def counted(batch: Rows) -> Rows:
            progress.update(len(batch[names[0]]))
            return function(batch)

        return rows.map(counted, batched=True, remove_columns=names, new_fingerprint=key, **options)


def table_checksum(table: Dataset, columns: list[str]) -> str:
    """Return a SHA-256 of the numbers in these columns, whose values are a number or a list each."""
    digest = hashlib.sha256()
    for rows in table.select_columns(columns).with_format("arrow").iter(10_000):
        for name in columns:
            values = rows[name].combine_chunks()
            if isinstance(table.features[name], List):
                digest.update(values.value_lengths().to_numpy().tobytes())
                values = values.flatten()
            digest.update(values.to_numpy().tobytes())
    return digest.hexdigest()
