"""What text tasks share: a dataset on the Hub or in files, its splits, and the rows to train and to evaluate on."""

import sys
from collections import Counter
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, NamedTuple

import datasets
import numpy as np
from datasets import Dataset, DownloadManager, load_dataset, load_dataset_builder
from huggingface_hub import metadata_load
from pydantic import PrivateAttr

from src.config.errors import UserError, as_user_error, listed
from src.config.terminal import is_first, say
from src.tasks.base import Task
from src.tasks.text.files import EVALUATION, EXTENSIONS, by_split, find_files
from src.tasks.text.hub import loading
from src.tasks.text.rows import (
    NOTE,
    Encoders,
    Split,
    content_digest,
    missing_columns,
    notes_of,
    open_files,
    text_rows,
    write_parquet,
)
from src.tasks.text.settings import TextSettings

PART_NAMES = {"train": "the training data", "eval": "the evaluation data"}
SKIP = "or skip such rows with --task.bad_rows=skip"


class Opened(NamedTuple):
    """Holds the splits of a dataset, whose rows are not read yet."""

    train: Split
    evaluation: Split | None
    """The rows to evaluate on, if the dataset has a split for them."""


class TextTask(TextSettings, Task):
    """Reads the rows of a text task, as its settings say."""

    _skipped_rows: Counter[str] = PrivateAttr(default_factory=Counter)

    def open_rows(self) -> Opened:
        """Return the splits of the dataset that the settings name. Raise a UserError that says in one line what cannot
        be loaded and what to do."""
        return self.open_dataset(self.dataset, self.dataset_config)

    def open_dataset(self, dataset: str, config: str | None) -> Opened:
        """Return the splits of a dataset, or of one of its configurations."""
        datasets.logging.set_verbosity(datasets.logging.CRITICAL)  # errors are raised, and reported in one line
        datasets.disable_progress_bars()  # finished bars would stay on the screen
        with loading("dataset", dataset):
            splits = find_splits(dataset, config)
        others = (name for name in EVALUATION if name in splits and name != self.train_split)
        evaluation = self.eval_split or next(others, None)
        self._skipped_rows.clear()
        used = {"train_split": self.train_split or evaluation or "train", "eval_split": evaluation}
        for setting, split in used.items():
            if split and split not in splits:
                raise UserError(f"task.{setting}={split}: {dataset} has {listed(splits)}")
        parts: Any = (split and self.open_split(splits[split], dataset, config, split) for split in used.values())
        return Opened(*parts)

    @cached_property
    def eval_sets(self) -> Any:
        """Return the sets of `eval_datasets`: of each, what a task with this one's labels evaluates on if it has that
        dataset alone, and no training data."""
        sets = {}
        unset = dict.fromkeys(("dataset_config", "train_split", "eval_split", "sources", "streaming"))
        for name, dataset in self.eval_datasets.items():
            task = self.model_copy(update={**unset, "dataset": dataset, "eval_from": "all"})
            with as_user_error(f"task.eval_datasets.{name}: ", UserError):
                _, sets[name] = task.build_datasets()
            own = [remark for remark in task.state.remarks if remark not in self.state.remarks]
            own.append(f"{task.dataset_size(sets[name])}, skipped rows {task._skipped_rows['train']:,}")
            self.state.remarks += [f"evaluation set {name}: {remark}" for remark in own]
            # such as the day that its chats are dated with
            self.state.data |= task.state.data
        return sets

    def open_split(self, files: dict[str, str], dataset: str, config: str | None, split: str) -> Split:
        """Return a split of a dataset, given its files, each with its version. Raise a UserError if none has rows."""
        if is_on_hub(dataset):
            with loading("dataset", dataset):
                # on the Hub, a .txt has one document per line, and compressed files would have to be unpacked
                if files and all(file.lower().endswith(EXTENSIONS[1:]) for file in files):
                    local = dict(zip(DownloadManager().download([*files]), files, strict=True))
                else:
                    local = {write_parquet(load_dataset(dataset, config, split=split), dataset): ""}
            return open_files(local, self.column_names, dataset)
        # tar, rsync and image layers change the times of files
        digests = {file: content_digest(file) for file in files if Path(file).exists()}
        return open_files(files | digests, self.column_names, dataset)

    def usable_parts(self, opened: Opened, encoders: Encoders) -> tuple[Dataset, Dataset]:
        """Return the usable rows to train on and to evaluate on: tables with these columns, all text. A dataset without
        an evaluation split is split in two. Raise a UserError if unusable rows may not be skipped, or too few rows are
        left."""
        rows = self.usable_rows(opened.train, encoders, "train")
        if opened.evaluation:
            return rows, self.usable_rows(opened.evaluation, encoders, "eval")
        return self.split(rows, opened.train.dataset)

    def usable_rows(self, split: Split, encoders: Encoders, part: Literal["train", "eval"]) -> Dataset:
        """Return the usable rows of a split as a table. Say if cells span several lines, as one after a stray quote
        does."""
        where = PART_NAMES[part]
        require_columns(encoders, split, where)
        table = text_rows(split, encoders, f"reading {where}")
        notes = notes_of(table)
        if is_first() and (spanning := [note for note in notes.values() if note.lines > 1]):
            longest = max(spanning, key=lambda note: note.lines)
            num_lines = len(table) + sum(note.lines - 1 for note in spanning)
            count = f"{num_lines:,} lines hold {len(table):,} rows: some quoted cells span lines"
            say(f"{where}: {count}; the longest row has {longest.lines:,}, from {longest.place}", file=sys.stderr)
        bad = {row: note for row, note in notes.items() if note.reason}
        if bad and (self.bad_rows == "refuse" or len(bad) == len(table)):
            first, *_ = bad.values()
            reason = first.reason.encode(errors="backslashreplace").decode()  # it may quote bytes that are not UTF-8
            count = f"{len(bad):,} of {len(table):,} rows in {where} cannot be used"
            raise UserError(f"{first.place}: {reason}; {count}: fix them, {SKIP}")
        self._skipped_rows[part] += len(bad)
        table = table.remove_columns(NOTE)
        return table.select(np.setdiff1d(np.arange(len(table)), [*bad])) if bad else table

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
            says = f"too few rows ({num_rows}) to hold out {100 * self.eval_fraction:g}% for evaluation"
            raise UserError(f"task.dataset={dataset}: {says} (task.eval_fraction)")
        return size


def is_on_hub(dataset: str) -> bool:
    """Return whether a dataset is neither here nor at a URL."""
    return "://" not in dataset and not Path(dataset).exists()


def find_splits(dataset: str, config: str | None) -> dict[str, dict[str, str]]:
    """Return the files of a dataset by split, each with its version, which is empty for those on the Hub: their URLs
    have a commit. If the Hub's client has cached a dataset without its files, its splits have none."""
    versions = {} if is_on_hub(dataset) else find_files(dataset)
    # a folder from `hf download` has a dataset card, which may declare several configurations
    card = Path(dataset, "README.md")
    declares = card.is_file() and "configs" in (metadata_load(card) or {})
    if versions and not declares:
        return {"train": versions} if dataset.lower().endswith(EXTENSIONS) else by_split(versions)
    builder = load_dataset_builder(dataset, config)
    found: Any = builder.config.data_files or dict.fromkeys(builder.info.splits or (), ())
    if others := [file for files in found.values() for file in files if versions and file not in versions]:
        raise UserError(f"task.dataset={dataset}: its README.md names {others[0]}, which is not a data file in it")
    return {str(split): {file: versions.get(file, "") for file in files} for split, files in found.items()}


def require_columns(encoders: Encoders, split: Split, where: str = "") -> None:
    """Raise a UserError if a split has no column that these encoders need."""
    if missing := missing_columns(encoders, split.column_names):
        says = f"task.dataset={split.dataset}: no column {missing}{where and f' in {where}'}"
        says += f"; its columns are {listed(split.column_names)}"
        if where == PART_NAMES["eval"]:
            says += ". Are labels withheld, as on Kaggle? Without that file, a part of the training data is held out"
        raise UserError(says)
