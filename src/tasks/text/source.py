"""Where a task's rows of text come from: a dataset on the Hub or local files, split to train and to evaluate on."""

import hashlib
import re
from collections.abc import Callable, Iterable, Iterator
from itertools import chain
from pathlib import Path
from typing import Annotated, Any, Literal

import datasets
from datasets import Dataset, List, load_dataset
from datasets.fingerprint import Hasher
from pydantic import Field

from src.config.errors import UserError, explained
from src.config.settings import Settings
from src.config.terminal import bar
from src.tasks.text.chats import normalize_chat, normalize_tools
from src.tasks.text.files import EVALUATION, LOADERS, files_by_split, path_error, read_files
from src.tasks.text.hub import loading

ColumnKind = Literal["text", "label", "chat", "tools"]
"""What a column's values are: text; a name or a whole number; messages; the tools that these may call."""
CODE = [file.read_text() for file in sorted(Path(__file__).parent.rglob("*.py"))]
"""The source of what makes the cached tables: when it changes, they are made again."""
PART_NAMES = {"train": "the data to train on", "eval": "the data to evaluate on"}


class TextSource(Settings):
    """Settings that tasks on text share, and the loading of their rows."""

    dataset: str = ""
    """A dataset on the Hub, a file (.txt, .jsonl, .json, .csv, .tsv, .parquet), or a folder of such files whose names
    say their split: train, and validation, dev or test. A .txt file is one document; in a .tsv, quotes are text."""
    dataset_config: str | None = None
    """Configuration (subset) of a dataset on the Hub."""
    column_names: list[str] = []
    """Names of the columns of a .csv or .tsv file without a header."""
    train_split: str = "train"
    """Split to train on."""
    eval_split: str | None = None
    """Split to evaluate on; null: validation, dev or test where there is one, else a part of train_split."""
    eval_fraction: Annotated[float, Field(gt=0, lt=1)] = 0.1
    """Share of train_split that is kept for evaluation if there is no split for it."""
    eval_from: Literal["random", "last", "all"] = "random"
    """Which share: rows drawn at random, the same in each run, or the last ones. A single document is always cut near
    its end. all: not a share, but all that is trained on, as src.tools.evaluate has it for other data."""
    bad_rows: Literal["refuse", "skip"] = "refuse"
    """What to do with rows whose text or label is missing or of another type: name them and stop, or leave them out."""
    _skipped_rows: dict[str, int] = {"train": 0, "eval": 0}

    def source_errors(self) -> Iterator[str]:
        """Yield what is wrong with the settings, a line each, found without loading anything."""
        path = Path(self.dataset)
        is_local = path.exists()
        is_hub_name = path.suffix.lower() not in LOADERS and re.fullmatch(r"[\w.-]+(/[\w.-]+)?", self.dataset)
        if not self.dataset:
            yield "task.dataset is not set: name a dataset on the Hub, a file or a folder"
        elif is_local and (error := path_error(path)):
            yield f"task.dataset={path}: {error}"
        elif not is_local and not is_hub_name:
            yield f"task.dataset={path}: no such file or folder"

    def load_rows(self) -> tuple[Any, Any]:
        """Return the rows to train on and, if the dataset has a split for it, the rows to evaluate on. Raise a
        UserError that says in one line what cannot be loaded and what to do."""
        datasets.logging.set_verbosity(datasets.logging.CRITICAL)  # errors are raised, and said in one line
        datasets.disable_progress_bars()  # they would stay when they are done
        path = Path(self.dataset)
        if path.exists():
            splits: Any = files_by_split(path)
        else:
            with loading("dataset", self.dataset):
                splits = load_dataset(self.dataset, self.dataset_config)
        parts = [splits[split] for split in self.used_splits([*splits])]
        train, *evaluation = [read_files(files, self.column_names) for files in parts] if path.exists() else parts
        return train, evaluation[0] if evaluation else None

    def used_splits(self, names: list[str]) -> list[str]:
        """Return the split to train on and, if there is one, the split to evaluate on. Raise a UserError if the dataset
        has none of that name."""
        others = (name for name in EVALUATION if name in names and name != self.train_split)
        used = {"train_split": self.train_split, "eval_split": self.eval_split or next(others, None)}
        for setting, split in used.items():
            if split and split not in names:
                raise UserError(f"task.{setting}={split}: {self.dataset} has {', '.join(names)}")
        return [split for split in used.values() if split]

    def usable_parts(
        self, train: Dataset, evaluation: Dataset | None, columns: dict[str, ColumnKind]
    ) -> tuple[Dataset, Dataset]:
        """Return the usable rows to train on and to evaluate on, splitting `train` if there is no evaluation split.
        Raise a UserError if there are unusable rows and they may not be skipped, or too few rows are left."""
        train = self._validate_rows(train, "train", columns)
        if evaluation is None:
            return self.split(train)
        return train, self._validate_rows(evaluation, "eval", columns)

    def _validate_rows(self, rows: Dataset, part: Literal["train", "eval"], columns: dict[str, ColumnKind]) -> Dataset:
        dataset, where = f"task.dataset={self.dataset}", PART_NAMES[part]
        self.require_columns(columns, rows.column_names, f" in {where}")
        bad: dict[int, str] = {}
        for name, kind in columns.items():
            # the JSON reader lets other encodings pass
            with explained(f"{dataset}: column {name} is not UTF-8, ", UnicodeDecodeError):
                bad |= {row: f"{name} {why}" for row, why in _bad_rows(rows, name, kind)}
        if bad and (self.bad_rows == "refuse" or len(bad) == len(rows)):
            first = min(bad)
            says = (
                f"{len(bad)} of {len(rows)} rows in {where} cannot be used, the first is row {first + 1}: {bad[first]}"
            )
            raise UserError(f"{dataset}: {says}; fix them, or leave them out with --task.bad_rows=skip")
        self._skipped_rows[part] = len(bad)
        return rows.select([row for row in range(len(rows)) if row not in bad]) if bad else rows

    def require_columns(self, needed: Iterable[str], names: list[str], where: str = "") -> None:
        """Raise a UserError if a column that is needed is not among these names."""
        if missing := " nor ".join(name for name in needed if name not in names):
            raise UserError(
                f"task.dataset={self.dataset}: no column {missing}{where}; its columns are {', '.join(names)}"
            )

    def split(self, rows: Dataset) -> tuple[Dataset, Dataset]:
        """Return `rows` split in two: one part to train on, one to evaluate on. Raise a UserError if there are too few
        rows."""
        if self.eval_from == "all":
            return rows, rows
        size = self.held_out(len(rows))
        parts = rows.train_test_split(size, shuffle=self.eval_from == "random", seed=0)
        return parts["train"], parts["test"]

    def held_out(self, num_rows: int) -> int:
        """Return how many rows are kept for evaluation. Raise a UserError if there are too few."""
        size = round(num_rows * self.eval_fraction)
        if not 0 < size < num_rows:
            says = f"{num_rows} rows are too few to keep {self.eval_fraction:g} of them for evaluation"
            raise UserError(f"task.dataset={self.dataset}: {says} (task.eval_fraction)")
        return size


def cached_map(rows: Dataset, function: Callable[..., dict[str, list[Any]]], desc: str, **options: Any) -> Dataset:
    """Return what `function` makes of batches of all columns; the second time, even in another process, from the cache,
    as long as the rows, the function with its arguments (a partial's, or its object's fields) and CODE are the same."""
    key = Hasher.hash([rows._fingerprint, function, CODE])
    names = rows.column_names
    with bar(desc, total=len(rows)) as progress:

        def counted(batch: dict[str, list[Any]]) -> dict[str, list[Any]]:
            progress.update(len(batch[names[0]]))
            return function(batch)

        return rows.map(counted, batched=True, remove_columns=names, new_fingerprint=key, **options)


def table_checksum(table: Dataset, columns: list[str]) -> str:
    """Return a SHA-256 of the numbers in these columns, row by row: a number each, or a list."""
    digest = hashlib.sha256()
    for rows in table.select_columns(columns).with_format("arrow").iter(10_000):
        for name in columns:
            values = rows[name].combine_chunks()
            if isinstance(table.features[name], List):
                digest.update(values.value_lengths().to_numpy().tobytes())
                values = values.flatten()
            digest.update(values.to_numpy().tobytes())
    return digest.hexdigest()


def _bad_rows(rows: Dataset, column: str, kind: ColumnKind) -> Iterator[tuple[int, str]]:
    """Yield the rows whose value is not of this kind, and what it is instead."""
    batches = rows.select_columns(column).iter(1000)
    for row, value in enumerate(chain.from_iterable(batch[column] for batch in batches)):
        if says := complaint(value, kind):
            yield row, says


def complaint(value: Any, kind: ColumnKind) -> str | None:
    """Return what a value is instead of being of this kind; None: it is."""
    check = {"text": _check_text, "label": _check_label, "chat": normalize_chat, "tools": normalize_tools}[kind]
    try:
        check(value)
    except ValueError as error:
        return str(error)
    return None


def _check_text(value: Any) -> None:
    if value is None or (isinstance(value, str) and not value.strip()):
        raise ValueError("is empty")
    if not isinstance(value, str):
        raise ValueError(f"is {type(value).__name__}, not text")


def _check_label(value: Any) -> None:
    is_number = isinstance(value, int | float) and value == value  # bool is one; pandas marks what is missing with NaN
    if not is_number:
        _check_text(value)
