"""Where a task's rows of text come from: a dataset on the Hub or local files, split to train and to evaluate on."""

from __future__ import annotations

import csv
import glob
import re
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field, NonNegativeInt, PrivateAttr

from src.settings import Settings

if TYPE_CHECKING:  # settings are checked, and --help answers, before datasets is imported
    from datasets import Dataset, DatasetDict

LOADERS = {".txt": "text", ".jsonl": "json", ".json": "json", ".csv": "csv", ".tsv": "csv", ".parquet": "parquet"}
EVALUATION = ("validation", "valid", "val", "dev", "eval", "evaluation", "test")
"""What an evaluation split is called; the first that there is counts."""


class TextSource(Settings):
    """Settings that tasks on text share, and the loading of their rows."""

    dataset: str = ""
    """A dataset on the Hub, a file (.txt, .jsonl, .json, .csv, .tsv, .parquet), or a folder of such files whose names
    say their split: train, and validation, dev or test. A .txt file is one document."""
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
        elif path.is_dir():
            used = [file for group in _files_by_split(path).values() for file in group]
            kinds = {file.suffix for file in used}
            if len(kinds) != 1:
                found = "files of several kinds" if kinds else "no file"
                yield f"task.dataset={path}: the folder has {found}; it must hold files of one of {', '.join(LOADERS)}"
            elif unsaid := [file.name for file in _files(path) if file.suffix in kinds and file not in used]:
                yield (
                    f"task.dataset={path}: the names of other files say their split, but not {', '.join(unsaid)}: "
                    f"rename or move away what is not to be used"
                )
        elif path.is_file() and path.suffix not in LOADERS:
            yield f"task.dataset={path}: {path.suffix or 'no suffix'} is none of {', '.join(LOADERS)}"
        elif not path.exists() and (path.suffix in LOADERS or not re.fullmatch(r"[\w.-]+(/[\w.-]+)?", self.dataset)):
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
                raise ValueError(f"task.{setting}={split}: {self.dataset} has {', '.join(splits)}")
        others = [name for name in EVALUATION if name in splits and name != self.train_split]
        eval_split = self.eval_split or next(iter(others), None)
        used = [splits[split] for split in (self.train_split, eval_split) if split]
        train, *evaluation = [self._from_files(files) for files in used] if path.exists() else used
        return train, evaluation[0] if evaluation else None

    @property
    def skipped_rows(self) -> dict[str, int]:
        """How many rows `usable` left out of "train" and "eval"."""
        return {"train": 0, "eval": 0} | self._skipped_rows

    def usable(self, rows: Dataset, part: Literal["train", "eval"], columns: dict[str, Any]) -> Dataset:
        """The rows whose `columns` hold values of these types, none of them empty: str, str | int, or list of messages.

        Raises:
            ValueError: a column is not there, there are other rows and they may not be skipped, or none is left.
        """
        where = "the data to train on" if part == "train" else "the data to evaluate on"
        missing = [name for name in columns if name not in rows.column_names]
        if missing:
            raise ValueError(
                f"task.dataset={self.dataset}: no column {' nor '.join(missing)} in {where}; "
                f"its columns are {', '.join(rows.column_names)}"
            )
        try:
            bad = sorted({row for name, kind in columns.items() for row in _bad_rows(rows, name, kind)})
        except UnicodeError as error:
            raise ValueError(f"task.dataset={self.dataset}: cannot be read, {error}") from error
        if bad and self.bad_rows == "refuse":
            named = ", ".join(str(row + 1) for row in bad[:5]) + (", …" if len(bad) > 5 else "")
            raise ValueError(
                f"task.dataset={self.dataset}: {len(bad)} of {len(rows)} rows in {where} have no usable "
                f"{' or '.join(columns)} (row {named}; the first is 1): mend them, or leave them out with "
                f"--task.bad_rows=skip"
            )
        if len(bad) == len(rows):
            raise ValueError(f"task.dataset={self.dataset}: no usable row in {where}")
        if bad:
            self._skipped_rows[part] = len(bad)
            skipped = set(bad)
            rows = rows.select([row for row in range(len(rows)) if row not in skipped])
        return rows

    def split(self, rows: Dataset) -> tuple[Dataset, Dataset]:
        """`rows` in two: the larger part to train on, the smaller to evaluate on.

        Raises:
            ValueError: there are too few rows.
        """
        size = round(len(rows) * self.eval_fraction)
        if not 0 < size < len(rows):
            raise ValueError(
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
                raise ValueError(f"task.dataset={file}: the file is empty")
        options, names = self._options(files[0]), [glob.escape(str(file)) for file in files]
        try:
            return load_dataset(LOADERS[files[0].suffix], data_files=names, split="train", **options)
        except Exception as error:  # of many kinds: pandas', arrow's, those of datasets
            says = "no row in it" if "corresponds to no data" in str(error) else f"cannot be read, {_cause(error)}"
            raise ValueError(f"task.dataset={self.dataset}: {says}") from error

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
            raise ValueError(
                f"task.dataset={self.dataset}: no such file or folder here, and not to be had from the Hub "
                f"({_cause(error)}); offline, download it before with `hf download --repo-type dataset {self.dataset}` "
                f"and set HF_HUB_OFFLINE=1"
            ) from error
        except Exception as error:  # of many kinds, as above
            is_config = "BuilderConfig" in str(error)
            where = f"task.dataset_config={self.dataset_config}" if is_config else f"task.dataset={self.dataset}"
            raise ValueError(f"{where}: cannot be read, {_cause(error)}") from error

    def _options(self, file: Path) -> dict[str, Any]:
        from datasets import Features, Value

        if file.suffix == ".txt":
            return {"sample_by": "document", "encoding": "utf-8-sig"}
        if file.suffix not in (".csv", ".tsv"):
            return {}
        # Every column as text, as it stands there: "null" and "NA" are words. In a .tsv, quotes are text too.
        dialect: dict[str, Any] = {"sep": "\t", "quoting": csv.QUOTE_NONE} if file.suffix == ".tsv" else {"sep": ","}
        try:
            with file.open(newline="", encoding="utf-8-sig") as lines:
                header = next(csv.reader(lines, delimiter=dialect["sep"], quoting=dialect.get("quoting", 0)), [])
        except UnicodeDecodeError as error:
            raise ValueError(f"task.dataset={file}: cannot be read, it is not UTF-8") from error
        names = self.column_names or [name or f"Unnamed: {i}" for i, name in enumerate(header)]  # as pandas calls it
        if len(names) != len(header):
            raise ValueError(f"task.column_names has {len(names)} names, but {file} has {len(header)} columns")
        if twice := sorted({name for name in names if names.count(name) > 1}):
            raise ValueError(f"task.dataset={file}: the column {twice[0]} is there twice")
        if self.column_names:
            dialect["column_names"] = names
        text = Features({name: Value("string") for name in names})
        return dialect | {"features": text, "na_filter": False, "encoding": "utf-8-sig"}


def _files_by_split(path: Path) -> dict[str, list[Path]]:
    """The files whose names say their split; where none does, all are to train on."""
    if path.is_file():
        return {"train": [path]}
    splits: dict[str, list[Path]] = {}
    for file in _files(path):
        words = re.split(r"[^a-z]+", file.stem.lower())
        if split := next((word for word in words if word in ("train", *EVALUATION)), None):
            splits.setdefault(split, []).append(file)
    return splits or {"train": _files(path)}


def _files(folder: Path) -> list[Path]:
    return sorted(file for file in folder.iterdir() if file.suffix in LOADERS)


def _bad_rows(rows: Dataset, column: str, kind: Any) -> Iterator[int]:
    from datasets import Value

    feature = rows.features[column]
    if kind is not list and isinstance(feature, Value) and feature.dtype in ("string", "large_string"):
        import pyarrow
        import pyarrow.compute as pc

        values = rows.with_format("arrow")[:][column]
        try:
            empty = pc.fill_null(pc.equal(pc.utf8_trim_whitespace(values), ""), True)
        except pyarrow.ArrowInvalid as error:  # the JSON reader lets other encodings pass
            raise UnicodeError(f"column {column} is not UTF-8 ({error})") from error
        yield from pc.indices_nonzero(empty).to_pylist()
        return
    for row, value in enumerate(rows[column]):
        if isinstance(value, str):
            is_good = kind is not list and bool(value.strip())
        elif kind is list:
            is_good = isinstance(value, list) and bool(value) and all(map(_is_message, value))
        else:
            is_good = isinstance(value, kind)
        if not is_good:
            yield row


def _is_message(value: Any) -> bool:
    return isinstance(value, dict) and all(isinstance(value.get(key), str) for key in ("role", "content"))


def _cause(error: Exception) -> str:
    return " ".join(str(error.__cause__ or error).split())[:200]
