"""Where a task's rows of text come from: a dataset on the Hub or local files, split to train and to evaluate on."""

from __future__ import annotations

import csv
import glob
import hashlib
import re
from collections.abc import Callable, Iterator
from decimal import Decimal
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field, NonNegativeInt, PrivateAttr

from src.process import UserError
from src.settings import Settings

if TYPE_CHECKING:  # settings are checked, and --help answers, before datasets is imported
    from datasets import Dataset, DatasetDict

LOADERS = {".txt": "text", ".jsonl": "json", ".json": "json", ".csv": "csv", ".tsv": "csv", ".parquet": "parquet"}
Kind = Literal["text", "label", "chat", "tools"]
"""What a column's values are: text; a name or a whole number; messages; the tools that these may call."""
PACKED = (".gz", ".zip", ".bz2", ".xz", ".zst")
SAVED_TO_DISK = ("dataset_info.json", "dataset_dict.json")
"""Of a folder that datasets' save_to_disk wrote, one is there."""
EVALUATION = ("validation", "valid", "val", "dev", "eval", "evaluation", "test")
"""What an evaluation split is called; the first that there is counts."""


class TextSource(Settings):
    """Settings that tasks on text share, and the loading of their rows."""

    dataset: str = ""
    """A dataset on the Hub, a file (.txt, .jsonl, .json, .csv, .tsv, .parquet), or a folder of such files whose names
    say their split: train, and validation, dev or test. A .txt file is one document; in a .tsv, quotes are text."""
    dataset_config: str | None = None
    """Which of a Hub dataset's configurations (subsets)."""
    column_names: list[str] = []
    """Names of the columns of a .csv or .tsv file without a header."""
    train_split: str = "train"
    """Split to train on."""
    eval_split: str | None = None
    """Split to evaluate on; null: validation, dev or test where there is one, else a part of train_split."""
    eval_fraction: Annotated[float, Field(gt=0, lt=1)] = 0.1
    """Share of train_split that is kept for evaluation where there is no split for it."""
    eval_from: Literal["random", "last"] = "random"
    """Which share: rows drawn with split_seed, or the last ones. A single document is always cut, near its end."""
    split_seed: NonNegativeInt = 0
    """Of the draw; not the run's seed, so that runs with other seeds evaluate on the same rows."""
    bad_rows: Literal["refuse", "skip"] = "refuse"
    """What to do with rows whose text or label is missing or of another type: end with their numbers, or leave out."""
    _skipped_rows: dict[str, int] = PrivateAttr(default_factory=dict)

    def source_mistakes(self) -> Iterator[str]:
        """What is wrong with the settings, one line each, found without loading anything."""
        path = Path(self.dataset)
        if not self.dataset:
            yield "task.dataset is not set: name a dataset on the Hub, a file or a folder"
        elif path.exists() and self.dataset_config:
            yield f"task.dataset_config={self.dataset_config}: {path} is not on the Hub, and has none"
        elif saved := next((name for name in SAVED_TO_DISK if (path / name).is_file()), None):
            yield (
                f"task.dataset={path}: was written by save_to_disk ({saved}), which is not read: write each split with "
                f"to_parquet, to train.parquet and validation.parquet"
            )
        elif path.is_dir():
            used = [file for group in _files_by_split(path).values() for file in group]
            kinds = {_suffix(file) for file in used}
            if len(kinds) != 1:
                found = "files of several kinds" if kinds else "no file"
                yield f"task.dataset={path}: the folder has {found}; it must hold files of one of {', '.join(LOADERS)}"
            elif unsaid := [file.name for file in _files(path) if _suffix(file) in kinds and file not in used]:
                yield (
                    f"task.dataset={path}: the names of other files say their split, but not {', '.join(unsaid)}: "
                    f"rename or move away what is not to be used"
                )
            elif unread := _unread(path, kinds):
                yield f"task.dataset={path}: {unread} is not read: unpack it, or move it into the folder, or away"
        elif path.is_file() and _suffix(path) not in LOADERS:
            yield f"task.dataset={path}: {path.suffix or 'no suffix'} is none of {', '.join(LOADERS)}"
        elif not path.exists() and (_suffix(path) in LOADERS or not re.fullmatch(r"[\w.-]+(/[\w.-]+)?", self.dataset)):
            yield f"task.dataset={path}: no such file or folder"

    def load_rows(self) -> tuple[Dataset, Dataset | None]:
        """The rows to train on and, where there is a split of its own for it, to evaluate on.

        Raises:
            ValueError: in one line, what cannot be loaded and what to do.
        """
        import datasets

        datasets.logging.set_verbosity(datasets.logging.CRITICAL)  # errors are raised, and said in one line
        path = Path(self.dataset)
        splits: Any = _files_by_split(path) if path.exists() else self._from_hub()
        for setting, split in (("train_split", self.train_split), ("eval_split", self.eval_split)):
            if split and split not in splits:
                raise UserError(f"task.{setting}={split}: {self.dataset} has {', '.join(splits)}")
        others = [name for name in EVALUATION if name in splits and name != self.train_split]
        eval_split = self.eval_split or next(iter(others), None)
        used = [splits[split] for split in (self.train_split, eval_split) if split]
        train, *evaluation = [self._from_files(files) for files in used] if path.exists() else used
        return train, evaluation[0] if evaluation else None

    @property
    def skipped_rows(self) -> dict[str, int]:
        """How many rows `usable` left out of "train" and "eval"."""
        return {"train": 0, "eval": 0} | self._skipped_rows

    def usable(self, rows: Dataset, part: Literal["train", "eval"], columns: dict[str, Kind]) -> Dataset:
        """The rows whose `columns` hold what they should, none of them empty.

        Raises:
            ValueError: a column is not there, there are other rows and they may not be skipped, or none is left.
        """
        where = "the data to train on" if part == "train" else "the data to evaluate on"
        missing = [name for name in columns if name not in rows.column_names]
        if missing:
            raise UserError(
                f"task.dataset={self.dataset}: no column {' nor '.join(missing)} in {where}; "
                f"its columns are {', '.join(rows.column_names)}"
            )
        bad: dict[int, str] = {}
        for name, kind in columns.items():
            try:
                bad = {row: f"{name} {why}" for row, why in _bad_rows(rows, name, kind)} | bad
            except UnicodeError as error:
                raise UserError(f"task.dataset={self.dataset}: cannot be read, {error}") from error
        if bad and self.bad_rows == "refuse":
            first, *others = sorted(bad)
            named = ", ".join(str(row + 1) for row in (first, *others[:4])) + (", …" if len(others) > 4 else "")
            raise UserError(
                f"task.dataset={self.dataset}: {len(bad)} of {len(rows)} rows in {where} have no usable "
                f"{' or '.join(columns)} (row {named}; the first is 1): in row {first + 1} {bad[first]}; mend them, or "
                f"leave them out with --task.bad_rows=skip"
            )
        if len(bad) == len(rows):
            why = f": in row 1 {bad[0]}" if bad else ""
            raise UserError(f"task.dataset={self.dataset}: no usable row in {where}{why}")
        if bad:
            self._skipped_rows[part] = len(bad)
            rows = rows.select([row for row in range(len(rows)) if row not in bad])
        return rows

    def split(self, rows: Dataset) -> tuple[Dataset, Dataset]:
        """`rows` in two: the larger part to train on, the smaller to evaluate on.

        Raises:
            ValueError: there are too few rows.
        """
        size = round(len(rows) * self.eval_fraction)
        if not 0 < size < len(rows):
            raise UserError(
                f"task.dataset={self.dataset}: {len(rows)} rows are too few to keep "
                f"{self.eval_fraction:g} of them for evaluation (task.eval_fraction)"
            )
        if self.eval_from == "last":
            cut = len(rows) - size
            return rows.select(range(cut)), rows.select(range(cut, len(rows)))
        parts = rows.train_test_split(size, seed=self.split_seed)
        return parts["train"], parts["test"]

    def source_card(self) -> dict[str, Any]:
        """Metadata for the model card."""
        return {} if Path(self.dataset).exists() else {"datasets": [self.dataset]}

    def _from_files(self, files: list[Path]) -> Dataset:
        from datasets import load_dataset

        for file in files:
            if file.stat().st_size == 0:
                raise UserError(f"task.dataset={file}: the file is empty")
        options, names = self._options(files), [glob.escape(str(file)) for file in files]
        try:
            return load_dataset(LOADERS[_suffix(files[0])], data_files=names, split="train", **options)
        except Exception as error:  # of many kinds: pandas', arrow's, those of datasets
            says = "no row in it" if "corresponds to no data" in str(error) else f"cannot be read, {_cause(error)}"
            raise UserError(f"task.dataset={self.dataset}: {says}") from error

    def _from_hub(self) -> DatasetDict:
        from datasets import load_dataset
        from datasets.exceptions import DatasetNotFoundError
        from huggingface_hub import constants, snapshot_download
        from huggingface_hub.errors import LocalEntryNotFoundError

        try:
            try:
                return load_dataset(self.dataset, self.dataset_config)
            except ConnectionError:
                if not constants.HF_HUB_OFFLINE:
                    raise
                folder = snapshot_download(self.dataset, repo_type="dataset", local_files_only=True)
                return load_dataset(folder, self.dataset_config)
        except (ConnectionError, DatasetNotFoundError, LocalEntryNotFoundError) as error:
            raise UserError(
                f"task.dataset={self.dataset}: no such file or folder here, and not to be had from the Hub "
                f"({_cause(error)}); offline, download it before with `hf download --repo-type dataset {self.dataset}` "
                f"and set HF_HUB_OFFLINE=1"
            ) from error
        except Exception as error:  # of many kinds, as above
            is_config = "BuilderConfig" in str(error)
            where = f"task.dataset_config={self.dataset_config}" if is_config else f"task.dataset={self.dataset}"
            raise UserError(f"{where}: cannot be read, {_cause(error)}") from error

    def _options(self, files: list[Path]) -> dict[str, Any]:
        from datasets import Features, Value

        suffix = _suffix(files[0])
        if self.column_names and LOADERS[suffix] != "csv":
            raise UserError(f"task.column_names is for .csv and .tsv files, and {files[0]} is none")
        if suffix == ".txt":
            return {"sample_by": "document", "encoding": "utf-8-sig"}
        if suffix not in (".csv", ".tsv"):
            return {}
        # Every column as text, as it stands there: "null" and "NA" are words. In a .tsv, quotes are text too.
        dialect: dict[str, Any] = {"sep": "\t", "quoting": csv.QUOTE_NONE} if suffix == ".tsv" else {"sep": ","}
        first, *others = [self._columns(file, dialect) for file in files]
        for file, names in zip(files[1:], others, strict=True):
            if absent := [name for name in first if name not in names]:
                raise UserError(f"task.dataset={file}: has no column {absent[0]}, which {files[0]} has")
        if self.column_names:
            dialect["column_names"] = first
        text = Features({name: Value("string") for name in first})
        return dialect | {"features": text, "na_filter": False, "encoding": "utf-8-sig"}

    def _columns(self, file: Path, dialect: dict[str, Any]) -> list[str]:
        """The names of a table's columns, in their order.

        Raises:
            ValueError: it has others than column_names, a name twice, or a first row that is longer than that.
        """
        csv.field_size_limit(2**31 - 1)  # as pandas, which has none
        try:
            with file.open(newline="", encoding="utf-8-sig") as stream:
                lines = csv.reader(stream, delimiter=dialect["sep"], quoting=dialect.get("quoting", 0))
                rows = (line for line in lines if line)  # as pandas, which skips empty lines
                header, row = next(rows, []), next(rows, [])
        except UnicodeDecodeError as error:
            raise UserError(f"task.dataset={file}: cannot be read, it is not UTF-8") from error
        except csv.Error as error:
            raise UserError(f"task.dataset={file}: cannot be read, {error}") from error
        names = self.column_names or [name or f"Unnamed: {i}" for i, name in enumerate(header)]  # as pandas calls it
        if len(names) != len(header):
            raise UserError(f"task.column_names has {len(names)} names, but {file} has {len(header)} columns")
        if self.column_names == header:
            raise UserError(f"task.column_names: {file} has that header itself; leave them out")
        if len(header) == 1 and not self.column_names and (other := re.search("[;\t|]", header[0])):
            raise UserError(
                f"task.dataset={file}: its only column would be {header[0]!r}: fields of a {_suffix(file)} file are "
                f"separated by {'tabs' if _suffix(file) == '.tsv' else 'commas'}, not by {other[0]!r}"
            )
        if twice := sorted({name for name in names if names.count(name) > 1}):
            raise UserError(f"task.dataset={file}: the column {twice[0]} is there twice")
        if len(row) > len(names):  # pandas would take the first field for the row's name
            raise UserError(
                f"task.dataset={file}: row 1 has {len(row)} fields, and the header {len(names)}: mend such rows; where "
                f"a text has the separator in it, it needs quotes around it"
            )
        return names


def table_checksum(table: Dataset, columns: list[str]) -> str:
    """Of the numbers in these columns, row by row: a number each, or a list."""
    digest = hashlib.sha256()
    for rows in table.select_columns(columns).with_format("arrow").iter(10_000):
        for column in rows.columns:
            values = column.combine_chunks()
            if hasattr(values, "value_lengths"):
                digest.update(values.value_lengths().to_numpy().tobytes())
                values = values.flatten()
            digest.update(values.to_numpy().tobytes())
    return digest.hexdigest()


def _suffix(file: Path) -> str:
    return file.suffix.lower()


def _files_by_split(path: Path) -> dict[str, list[Path]]:
    """The files whose names say their split; where none does, all are to train on."""
    if path.is_file():
        return {"train": [path]}
    splits: dict[str, list[Path]] = {}
    for file in _files(path):
        words = [re.sub("(?<=.{3})(ing|set|data|split)$", "", w) for w in re.split(r"[^a-z]+", file.stem.lower())]
        if named := [word for word in words if word in ("train", *EVALUATION)]:
            splits.setdefault(named[-1], []).append(file)  # train_test_split_test.csv
    return splits or {"train": _files(path)}


def _unread(folder: Path, kinds: set[str]) -> str | None:
    """Return the name of a packed file of one of these kinds in a folder, or of one in a folder below, if any."""
    for file in sorted([*folder.glob("[!.]*"), *folder.glob("[!.]*/[!.]*")]):
        is_packed = _suffix(file) in PACKED
        if (is_packed or file.parent != folder) and _suffix(Path(file.stem) if is_packed else file) in kinds:
            return str(file.relative_to(folder))
    return None


def _files(folder: Path) -> list[Path]:
    return sorted(file for file in folder.iterdir() if _suffix(file) in LOADERS)


def _bad_rows(rows: Dataset, column: str, kind: Kind) -> Iterator[tuple[int, str]]:
    """The rows whose value is not of this kind, and what it is instead."""
    from datasets import Value

    feature = rows.features[column]
    if kind in ("text", "label") and isinstance(feature, Value) and feature.dtype in ("string", "large_string"):
        import pyarrow
        import pyarrow.compute as pc

        values = rows.with_format("arrow")[:][column]
        try:
            empty = pc.fill_null(pc.equal(pc.utf8_trim_whitespace(values), ""), True)
        except pyarrow.ArrowInvalid as error:  # the JSON reader lets other encodings pass
            raise UnicodeError(f"column {column} is not UTF-8 ({error})") from error
        yield from ((row, "is empty") for row in pc.indices_nonzero(empty).to_pylist())
        return
    require = _requirement(kind)
    for row, value in enumerate(rows[column]):
        try:
            require(value)
        except ValueError as error:
            yield row, str(error)


def _requirement(kind: Kind) -> Callable[[Any], object]:
    """What raises a ValueError that says in which way a value is not of this kind."""
    if kind in ("text", "label"):
        return _require_text if kind == "text" else _require_label
    from src.data import chats

    return chats.understood if kind == "chat" else chats.understood_tools


def _require_text(value: Any) -> None:
    if value is None or (isinstance(value, str) and not value.strip()):
        raise UserError("is empty")
    if isinstance(value, list) and value and all(isinstance(part, dict) for part in value):
        raise UserError(
            "is a list of messages, not text: put each chat into one column, named by --task.messages_column"
        )
    if not isinstance(value, str):
        raise UserError(f"is {type(value).__name__}, not text")


def _require_label(value: Any) -> None:
    if isinstance(value, float | Decimal):
        if value != value:  # NaN, with which pandas marks what is missing
            raise UserError("is empty")
        if value != value // 1:
            raise UserError(f"is {value}, neither a name nor a whole number")
    elif not isinstance(value, int):  # bool is one
        _require_text(value)


def _cause(error: Exception) -> str:
    return " ".join(str(error.__cause__ or error).split())[:200]
