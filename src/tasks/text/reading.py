"""Reading of a text task's rows: a dataset on the Hub or local files, split into training and evaluation data.

Rows are read as they are written, in groups, from files or tables.
"""

import hashlib
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property, lru_cache
from itertools import islice
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal, NamedTuple

import datasets
import fsspec
import numpy as np
import pyarrow as pa
from datasets import ClassLabel, Dataset, DownloadManager, Features, Json, List, Value, load_dataset
from datasets.arrow_writer import ArrowWriter
from datasets.fingerprint import Hasher
from huggingface_hub import metadata_load
from pyarrow import parquet
from pydantic import PrivateAttr

from src.config.errors import UserError, cause, listed, raise_if_any, reraised_as
from src.config.terminal import bar, is_first, say
from src.tasks.base import Task
from src.tasks.text.files import (
    EVALUATION,
    HAVE_LINES,
    TEXT_FORMATS,
    Group,
    Parsed,
    Shard,
    Splits,
    by_split,
    declared_features,
    find_files,
    index_files,
    loading,
    patiently,
    splits_of,
)
from src.tasks.text.listing import KINDS, lasting, list_files
from src.tasks.text.settings import TextSettings

Rows = dict[str, list[Any]]
"""Values of rows, by column."""
Found = tuple[Rows, dict[int, str]]
"""Rows as read, and why some of them cannot be used, by position."""
Encoder = Callable[[Any], str | None]
"""Returns a value as the text to keep; raises a ValueError that says why it cannot be used."""
Encoders = Mapping[str, Encoder]
"""Encoders of the columns in use, by column. If one accepts None, its column may be missing."""
ROW = "the row as text"
"""Name of a last column that no file has. Its encoder gets the values of the others, encoded, by column, and what it
returns is all that is kept of them."""


def as_text(value: Any) -> str:
    """Return a text as it is. Raise a ValueError if the value is empty or not text."""
    if value is None or (isinstance(value, str) and (not value or value.isspace())):
        raise ValueError("is empty")
    if not isinstance(value, str):
        raise ValueError(f"is {type(value).__name__}, not text")
    return encodable(value)


def as_label(value: Any) -> str:
    """Return a label, a number or text, as text without surrounding whitespace; equal numbers, such as 1, 1.0 and true,
    as the same text. Raise a ValueError if it is neither."""
    if isinstance(value, int | float) and value == value:  # NaN is no number
        return str(int(value) if value % 1 == 0 else value)
    return as_text(value).strip()


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


def arrow_values(table: pa.Table, columns: Sequence[str], features: Mapping[str, Any]) -> Found:
    """Return a table's values, and why some rows are unreadable, by position. `features` are those of `datasets`."""
    rows: Rows = {}
    unreadable: dict[int, str] = {}
    for name in columns:
        found = rows[name] = [None] * len(table)
        if name not in table.column_names:
            continue
        values, feature = table[name], features.get(name)
        is_plain = pa.types.is_string(values.type) and not isinstance(feature, Json)
        try:
            found[:] = values.to_pylist() if is_plain else [_as_meant(value, feature) for value in values.to_pylist()]
        except (ValueError, RecursionError):  # value by value takes 20 times as long
            for place, value in enumerate(values):
                try:
                    found[place] = _as_meant(value.as_py(), feature)
                except (ValueError, RecursionError) as error:
                    unreadable[place] = f"{name} cannot be read: {error}"
    return rows, unreadable


def _as_meant(value: Any, feature: Any) -> Any:
    """Return a table's value with names in place of label ids, if the table declares them, and without the nulls that
    stand for keys of other rows."""
    if isinstance(feature, Json) and isinstance(value, str):
        return json.loads(value)
    if isinstance(feature, ClassLabel) and isinstance(value, int) and 0 <= value < feature.num_classes:
        return feature.names[value]  # a number without a name, such as -1 for unknown, stays a number
    if isinstance(value, dict):
        inner = feature if isinstance(feature, dict) else {}
        return {key: _as_meant(part, inner.get(key)) for key, part in value.items() if part is not None}
    if isinstance(value, list):
        return [_as_meant(part, getattr(feature, "feature", None)) for part in value]
    return value


RowRange = tuple[int, int, int]
"""A range of rows in a source: the group, its first row, and the row after its last."""
BLOCK = 1024
"""Rows that are read from a table, or tokenized and stored, together."""
LARGEST_RANGE = 16 * BLOCK
"""Rows of a group that are read at once: a row group of parquet may have a million."""


class ShardReader:
    """Reads rows from files, group by group."""

    def __init__(self, shards: list[Shard]) -> None:
        self.shards = shards
        self.groups = [(shard, group) for shard in shards for group in shard.groups]
        self.sizes = np.array([group.rows for _, group in self.groups])
        """Rows of each group; shape (groups,), int64."""
        self.row_bytes = np.array([group.size / group.rows for _, group in self.groups])
        """Mean bytes of each group's rows, over all columns; shape (groups,), float64."""
        self.column_names = [*dict.fromkeys(name for shard in shards for name in shard.columns)]
        names = [[Path(shard.url).name, shard.digest] for shard in shards]
        self.fingerprint = hashlib.sha256(json.dumps(names).encode()).hexdigest()
        """Changes with the names, content and order of the files, not with their folder."""

    def read(self, number: int, first: int, last: int, columns: Sequence[str]) -> Found:
        """Return rows of a group, and why some of them are unreadable, by position. Missing values are None.

        Raises:
            UserError: the file is not the one that was indexed.
            RunError: the file could not be read, after several tries.
        """
        shard, group = self.groups[number]
        if shard.kind == ".parquet":
            own = tuple(name for name in columns if name in shard.columns)
            table = patiently(shard.url, lambda: _row_group(shard, group.start, own))
            return arrow_values(table[first:last], columns, declared_features(table.schema))
        parsed = _parse_group(shard, group)
        bad = {place - first: reason for place, reason in parsed.unreadable.items() if first <= place < last}
        return {name: [row.get(name) for row in parsed.rows[first:last]] for name in columns}, bad

    def version(self, number: int) -> str:
        """Return what changes with a group's content: for text, the file's digest, as tar, rsync and image layers
        change file times; for parquet, where the index has only seen the footer, the file's name and version too."""
        shard, group = self.groups[number]
        of_file = f"{Path(shard.url).name} {shard.version}" * (shard.kind == ".parquet")
        return f"{shard.digest} {of_file} {group.start}"

    def name(self, number: int, row: int) -> str:
        """Return the name of a group's row for messages: the file, and the line or row, counted from 1."""
        shard, group = self.groups[number]
        if shard.kind in HAVE_LINES:
            return f"{shard.url}, line {group.line + _parse_group(shard, group).lines[row]}"
        return f"{shard.url}, row {group.line + row}"


class TableReader:
    """Reads rows from a table, in groups of BLOCK."""

    shards: tuple[Shard, ...] = ()

    def __init__(self, table: Dataset, dataset: str) -> None:
        self._table, self._dataset, self.fingerprint = table.with_format("arrow"), dataset, table._fingerprint
        self.column_names = table.column_names
        self.sizes = np.array([min(BLOCK, len(table) - first) for first in range(0, len(table), BLOCK)])

    @cached_property
    def row_bytes(self) -> np.ndarray:
        """Return the mean bytes of each group's rows, over all columns; shape (groups,), float64."""
        return np.array([rows.nbytes / len(rows) for rows in self._table.iter(BLOCK)])

    def read(self, number: int, first: int, last: int, columns: Sequence[str]) -> Found:
        """Return rows of a group, and why some of them are unreadable, by position."""
        before = number * BLOCK
        return arrow_values(self._table[before + first : before + last], columns, self._table.features)

    def version(self, number: int) -> str:
        """Return what changes with a group's content."""
        return f"{self.fingerprint} {number}"

    def name(self, number: int, row: int) -> str:
        """Return the name of a group's row for messages."""
        return f"{self._dataset}, row {number * BLOCK + row + 1}"


Source = ShardReader | TableReader
"""Where rows are read from."""


class Opened(NamedTuple):
    """Holds the sources of a dataset, whose files are known but not read yet."""

    dataset: str
    train: Any
    """The Source of the training rows."""
    evaluation: Source | None
    """The Source of the evaluation rows, if the dataset has a split for them."""


def row_ranges(source: Source) -> list[RowRange]:
    """Return all rows of a source: one range for each group, or several for a large one."""
    return [
        (number, first, min(first + LARGEST_RANGE, size))
        for number, size in enumerate(source.sizes.tolist())
        for first in range(0, size, LARGEST_RANGE)
    ]


def read_text(source: Source, part: RowRange, columns: Encoders) -> Found:
    """Return the rows of a part as the text to keep, and why some of them cannot be used, by position."""
    number, first, last = part
    rows, bad = source.read(number, first, last, [*columns])
    for name, encode in columns.items():
        if name == ROW and ROW not in source.column_names:
            rows = {ROW: [dict(zip(rows, row, strict=True)) for row in zip(*rows.values(), strict=True)]}
        values = rows[name]
        for place, value in enumerate(values):
            try:
                values[place] = None if place in bad else encode(value)
            except ValueError as error:
                values[place] = None
                bad[place] = str(error) if name == ROW else f"{name} {error}"
    return rows, bad


@lru_cache(maxsize=2)  # a large row group is tokenized block by block
def _row_group(shard: Shard, number: int, columns: tuple[str, ...]) -> pa.Table:
    _require_unchanged(shard)
    with fsspec.open(shard.url, "rb") as file:
        return parquet.ParquetFile(file, pre_buffer=True).read_row_group(number, [*columns])


@lru_cache(maxsize=2)  # a .json file is one group
def _parse_group(shard: Shard, group: Group) -> Parsed:
    """Return the rows of a text file's group."""

    def read() -> bytes:
        _require_unchanged(shard)
        system, path = fsspec.core.url_to_fs(shard.url)
        return system.cat_file(path, start=group.start, end=group.end)  # s3fs takes the arguments in another order

    _, parse = TEXT_FORMATS[shard.kind]
    return parse(patiently(shard.url, read), shard.columns)


def _require_unchanged(shard: Shard) -> None:
    found = list_files(shard.url).get(shard.url, "")
    if lasting(found) != lasting(shard.version):
        says = "has changed or disappeared since it was indexed: restore it, or start a new run"
        raise UserError(f"{shard.url} {says}")


CODE = [file.read_bytes() for file in sorted(Path(__file__).parent.rglob("*.py"))]
"""The source code that makes the cached tables: when it changes, they are made again."""
PART_NAMES = {"train": "the training data", "eval": "the evaluation data"}
REASON = "why this row cannot be used"
"""Name of a column that is added to those of the data."""
SKIP = "or skip such rows with --task.bad_rows=skip"


class TextTask(TextSettings, Task):
    """Reads the rows of a text task, as its settings say."""

    _skipped_rows: dict[str, int] = PrivateAttr(default_factory=dict)

    def open_rows(self, dataset: str | None = None, config: str | None = None) -> Opened:
        """Return a reader for the rows of a dataset: by default, the one that the settings name. Raise a UserError that
        says in one line what cannot be loaded and what to do."""
        if dataset is None:
            dataset, config = self.dataset, self.dataset_config
        datasets.logging.set_verbosity(datasets.logging.CRITICAL)  # errors are raised, and reported in one line
        datasets.disable_progress_bars()  # finished bars would stay on the screen
        self._skipped_rows = {"train": 0, "eval": 0}
        with loading("dataset", dataset):
            splits = self._find_splits(dataset, config)
        others = (name for name in EVALUATION if name in splits and name != self.train_split)
        used = {"train_split": self.train_split, "eval_split": self.eval_split or next(others, None)}
        for setting, split in used.items():
            if split and split not in splits:
                raise UserError(f"task.{setting}={split}: {dataset} has {listed(splits)}")
        opened = [self._open(splits[split], dataset) if split else None for split in used.values()]
        return Opened(dataset, *opened)

    def _find_splits(self, dataset: str, config: str | None) -> dict[str, Any]:
        """Return the files of each split, each with its version; or a table, if `datasets` has to read them."""
        if "://" not in dataset and not Path(dataset).exists():
            return self.find_on_hub(dataset, config)
        versions = find_files(dataset)
        if dataset.lower().endswith(KINDS):
            return {"train": versions}
        # a folder from `hf download` has a dataset card, which may declare several configurations
        card = Path(dataset, "README.md")
        declares = card.is_file() and "configs" in (metadata_load(card) or {})
        files = splits_of(dataset, config) if declares else by_split(versions)
        return {split: {name: versions[name] for name in names} for split, names in files.items()}

    def find_on_hub(self, dataset: str, config: str | None) -> dict[str, Any]:
        """Download the files of a dataset on the Hub, and return them as `_find_splits` does."""
        files = splits_of(dataset, config)
        # on the Hub, a .txt has one document per line, and compressed files would have to be unpacked
        names = [name.lower() for names in files.values() for name in names]
        if not names or not all(name.endswith(KINDS[1:]) for name in names):
            tables: Any = load_dataset(dataset, config)
            return tables
        return with_versions(DownloadManager().download(files))

    def _open(self, found: Any, dataset: str) -> Source:
        """Return a reader for a table, or for the files that have rows. Raise a UserError if none has."""
        if isinstance(found, Dataset):
            return TableReader(found, dataset)
        shards = [shard for shard in index_files(found, self.column_names, cache_folder()) if shard.groups]
        if not shards:
            raise UserError(f"task.dataset={dataset}: its files ({len(found)}) have no rows")
        if is_first():
            say(*(f"{shard.url}: {shard.note}" for shard in shards if shard.note), file=sys.stderr)
        return ShardReader(shards)

    def usable_parts(self, opened: Opened, columns: Encoders) -> tuple[Dataset, Dataset]:
        """Return the usable rows to train on and to evaluate on: tables with these columns, all text. A dataset without
        an evaluation split is split in two. Raise a UserError if unusable rows may not be skipped, or too few rows are
        left."""
        rows = self.usable_rows(opened.dataset, opened.train, columns, "train")
        if opened.evaluation:
            return rows, self.usable_rows(opened.dataset, opened.evaluation, columns, "eval")
        return self.split(rows, opened.dataset)

    def usable_rows(
        self,
        dataset: str,
        source: Source,
        columns: Encoders,
        part: Literal["train", "eval"],
        ranges: list[RowRange] | None = None,
    ) -> Dataset:
        """Return the usable rows of a source, or of some ranges of it, as a table."""
        ranges = ranges or row_ranges(source)
        where = PART_NAMES[part]
        require_columns(columns, source, dataset, where)
        table = _read(source, ranges, columns, f"reading {where}")
        reasons = table.data.column(REASON)
        bad = np.flatnonzero(reasons.is_valid().to_numpy())
        table = table.remove_columns(REASON)
        if not len(bad):
            return table
        if self.bad_rows == "refuse" or len(bad) == len(table):
            places = ((group, row) for group, first, last in ranges for row in range(first, last))
            name = source.name(*next(islice(places, bad[0], None)))
            count = f"{len(bad):,} of {len(table):,} rows in {where} cannot be used"
            raise UserError(f"{name}: {reasons[bad[0]]}; {count}: fix them, {SKIP}")
        self._skipped_rows[part] += len(bad)
        return table.select(np.setdiff1d(np.arange(len(table)), bad))

    def split(self, rows: Dataset, dataset: str) -> tuple[Dataset, Dataset]:
        """Return `rows` split in two: one part to train on, one to evaluate on. Raise a UserError if there are too few
        rows."""
        if self.eval_from == "all":
            return rows, rows
        size = self.num_held_out(len(rows), dataset)
        parts = rows.train_test_split(size, shuffle=self.eval_from == "random", seed=0)
        return parts["train"], parts["test"]

    def num_held_out(self, num_rows: int, dataset: str) -> int:
        """Return how many rows are held out for evaluation. Raise a UserError if there are too few."""
        size = round(num_rows * self.eval_fraction)
        if not 0 < size < num_rows:
            says = f"{num_rows} rows are too few to hold out {self.eval_fraction:g} of them for evaluation"
            raise UserError(f"task.dataset={dataset}: {says} (task.eval_fraction)")
        return size


def with_versions(files: Splits) -> dict[str, dict[str, str]]:
    """Return the files of each split, each with its version."""
    folders = {name.rpartition("/")[0] for names in files.values() for name in names}
    versions = {name: version for folder in folders for name, version in find_files(folder).items()}
    return {split: {name: versions[name] for name in names} for split, names in files.items()}


def require_columns(columns: Encoders, source: Source, dataset: str, where: str = "") -> None:
    """Raise a UserError if a column is missing, from all files or some."""
    needed = [name for name, encode in columns.items() if name != ROW and not _takes_nothing(encode)]
    if missing := " nor ".join(name for name in needed if name not in source.column_names):
        says = f"task.dataset={dataset}: no column {missing}{where and f' in {where}'}"
        says += f"; its columns are {listed(source.column_names)}"
        if where == PART_NAMES["eval"]:
            says += ". Are labels withheld, as on Kaggle? Without that file, a part of the training data is held out"
        raise UserError(says)
    lacking = [(shard.url, [name for name in needed if name not in shard.columns]) for shard in source.shards]
    raise_if_any(f"{url}: no column {' nor '.join(names)}, which other files have" for url, names in lacking if names)


def _read(source: Source, parts: list[RowRange], columns: Encoders, desc: str) -> Dataset:
    """Return all rows of the parts as a table of text, with a column REASON, null where the row can be used. Later
    calls, even in another process, read it from the cache, as long as the content of the files is the same."""
    key = Hasher.hash([[source.version(number) for number, _, _ in parts], parts, columns, CODE])
    folder = cache_folder()
    file = folder / f"{key}.arrow"
    if file.exists():
        return Dataset.from_file(str(file))
    folder.mkdir(parents=True, exist_ok=True)
    kept = [ROW] if ROW in columns else [*columns]
    features = Features({name: Value("string") for name in [*kept, REASON]})
    num_rows = sum(last - first for _, first, last in parts)
    with TemporaryDirectory(dir=folder) as place, bar(desc, total=num_rows) as progress:
        unfinished = Path(place, file.name)
        with ArrowWriter(features=features, path=str(unfinished), fingerprint=key) as writer:
            for part in parts:
                rows, bad = read_text(source, part, columns)
                _, first, last = part
                # a reason may quote bytes that are not UTF-8
                said = {row: reason.encode(errors="backslashreplace").decode() for row, reason in bad.items()}
                reasons = [*map(said.get, range(last - first))]
                writer.write_table(pa.table({**rows, REASON: reasons}, features.arrow_schema))
                progress.update(last - first)
            writer.finalize()
        unfinished.replace(file)
    return Dataset.from_file(str(file))


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


def cache_folder() -> Path:
    """Return the folder where indexes, rows and blocks of tokens are cached."""
    return Path(datasets.config.HF_DATASETS_CACHE) / "rows"


def _takes_nothing(encode: Any) -> bool:
    """Return whether a column with this encoder may be missing."""
    try:
        encode(None)
    except ValueError:
        return False
    return True


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
