"""Where a task's rows of text come from: a dataset on the Hub or local files, split to train and to evaluate on."""

import hashlib
import re
import sys
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any, Literal

import datasets
import numpy as np
import pyarrow as pa
from datasets import Dataset, DownloadManager, Features, List, Value, load_dataset
from datasets.arrow_writer import ArrowWriter
from datasets.fingerprint import Hasher
from pydantic import Field

from src.config.errors import UserError, listed, refuse
from src.config.settings import Settings
from src.config.terminal import bar, is_first, say
from src.tasks.text.files import EVALUATION, KINDS, Splits, by_split, declared_splits, find_files, path_error, splits_of
from src.tasks.text.hub import loading
from src.tasks.text.index import index_files
from src.tasks.text.readers import Part, ShardReader, Source, TableReader, parts_of, read_text
from src.tasks.text.values import Encoders, Rows

CODE = [file.read_bytes() for file in sorted(Path(__file__).parent.rglob("*.py"))]
"""The source of what makes the cached tables: when it changes, they are made again."""
PART_NAMES = {"train": "the data to train on", "eval": "the data to evaluate on"}
REASON = "why this row cannot be used"
"""A column beside those of the data."""
SKIP = "or leave out such rows with --task.bad_rows=skip"


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
    """What to do with rows that cannot be read, or whose text or label is missing or of another type: name them and
    stop, or leave them out and count them."""
    _skipped_rows: dict[str, int] = {"train": 0, "eval": 0}

    def source_errors(self) -> Iterator[str]:
        """Yield what is wrong with the settings, a line each, found without loading anything."""
        path = Path(self.dataset)
        is_local = path.exists()
        is_hub_name = path.suffix.lower() not in KINDS and re.fullmatch(r"[\w.-]+(/[\w.-]+)?", self.dataset)
        if not self.dataset:
            yield "task.dataset is not set: name a dataset on the Hub, a file or a folder"
        elif is_local and (error := path_error(path)):
            yield f"task.dataset={path}: {error}"
        elif not is_local and not is_hub_name:
            yield f"task.dataset={path}: no such file or folder"
        if self.eval_split == self.train_split and self.eval_from != "all":
            says = "is what is trained on; without it, a part of that is kept to evaluate on"
            yield f"task.eval_split={self.eval_split}: {says}"

    def open_rows(self) -> tuple[Any, Any]:
        """Return what reads the rows to train on and, if the dataset has a split for it, the rows to evaluate on. Raise
        a UserError that says in one line what cannot be loaded and what to do."""
        datasets.logging.set_verbosity(datasets.logging.CRITICAL)  # errors are raised, and said in one line
        datasets.disable_progress_bars()  # they would stay when they are done
        self._skipped_rows.update(train=0, eval=0)
        with loading("dataset", self.dataset):
            splits = self._find_splits()
        others = (name for name in EVALUATION if name in splits and name != self.train_split)
        used = {"train_split": self.train_split, "eval_split": self.eval_split or next(others, None)}
        for setting, split in used.items():
            if split and split not in splits:
                raise UserError(f"task.{setting}={split}: {self.dataset} has {listed(splits)}")
        train, *evaluation = [self._open(splits[split]) for split in used.values() if split]
        return train, evaluation[0] if evaluation else None

    def _find_splits(self) -> dict[str, Any]:
        """Return the files of each split, each with its version; or a table, where `datasets` has to read them."""
        if "://" in self.dataset or Path(self.dataset).exists():
            versions = find_files(self.dataset)
            if self.dataset.lower().endswith(KINDS):
                return {"train": versions}
            files = declared_splits(self.dataset, self.dataset_config) or by_split(versions)
        else:
            files = splits_of(self.dataset, self.dataset_config)
            # a .txt there has a document a line, and what is compressed would have to be unpacked
            others = [name for names in files.values() for name in names if not name.lower().endswith(KINDS[1:])]
            if others or not files:
                return self.tables_of_hub(others)
            files = self.fetched(files)
            folders = {name.rpartition("/")[0] for names in files.values() for name in names}
            versions = {name: version for folder in folders for name, version in find_files(folder).items()}
        return {split: {name: versions[name] for name in names} for split, names in files.items()}

    def tables_of_hub(self, _others: list[str]) -> Any:
        """Return the splits of a dataset on the Hub that has files of other kinds than are read here."""
        return load_dataset(self.dataset, self.dataset_config)

    def fetched(self, files: Splits) -> Any:
        """Return the names that files on the Hub, by split, have once they are on this machine."""
        return DownloadManager().download(files)

    def _open(self, found: Any) -> Source:
        """Return what reads a table, or those files that have a row. Raise a UserError if none has."""
        if isinstance(found, Dataset):
            return TableReader(found, self.dataset)
        shards = [shard for shard in index_files(found, self.column_names, cache_folder()) if shard.groups]
        if not shards:
            raise UserError(f"task.dataset={self.dataset}: no row in its {len(found)} files")
        if is_first():
            say(*(f"{shard.url}: {shard.note}" for shard in shards if shard.note), file=sys.stderr)
        return ShardReader(shards)

    def usable_parts(self, train: Any, evaluation: Any, columns: Encoders) -> tuple[Any, Any]:
        """Return the usable rows to train on and to evaluate on, splitting the first if there is no evaluation split:
        tables with these columns, all text. Raise a UserError if there are unusable rows and they may not be skipped,
        or too few rows are left."""
        rows = self.usable_rows(train, columns, "train")
        if evaluation is None:
            return self.split(rows)
        return rows, self.usable_rows(evaluation, columns, "eval")

    def usable_rows(
        self, source: Source, columns: Encoders, part: Literal["train", "eval"], parts: list[Part] | None = None
    ) -> Dataset:
        """Return the usable rows of a source, or of some parts of it, as a table."""
        if parts is None:
            source = source.merged()
            parts = parts_of(source)
        where = PART_NAMES[part]
        self.require_columns(columns, source, where)
        table = self._read(source, parts, columns, f"reading {where}")
        reasons = table.data.column(REASON)
        bad = np.flatnonzero(reasons.is_valid().to_numpy())
        table = table.remove_columns(REASON)
        if not len(bad):
            return table
        if self.bad_rows == "refuse" or len(bad) == len(table):
            places = ((group, row) for group, first, last in parts for row in range(first, last))
            name = source.name(*next(islice(places, bad[0], None)))
            count = f"{len(bad):,} of {len(table):,} rows in {where} cannot be used"
            raise UserError(f"{name}: {reasons[bad[0]]}; {count}: fix them, {SKIP}")
        self._skipped_rows[part] += len(bad)  # of all sources of a mixture: the copies of a task share it
        return table.select(np.setdiff1d(np.arange(len(table)), bad))

    def _read(self, source: Source, parts: list[Part], columns: Encoders, desc: str) -> Dataset:
        """Return all rows of the parts as a table of text, with the column REASON: null where there is none. The second
        time, even in another process, from the cache, as long as the content of the files is the same."""
        key = Hasher.hash([source.content, parts, columns, CODE])
        folder = cache_folder()
        file = folder / f"{key}.arrow"
        if file.exists():
            return Dataset.from_file(str(file))
        folder.mkdir(parents=True, exist_ok=True)
        features = Features({name: Value("string") for name in [*columns, REASON]})
        num_rows = sum(last - first for _, first, last in parts)
        with TemporaryDirectory(dir=folder) as place, bar(desc, total=num_rows) as progress:
            unfinished = Path(place, file.name)
            with ArrowWriter(features=features, path=str(unfinished), fingerprint=key) as writer:
                for part in parts:
                    rows, bad = read_text(source, part, columns)
                    _, first, last = part
                    reasons = [bad.get(row) for row in range(last - first)]
                    writer.write_table(pa.table({**rows, REASON: reasons}, features.arrow_schema))
                    progress.update(last - first)
                writer.finalize()
            unfinished.replace(file)
        return Dataset.from_file(str(file))

    def require_columns(self, columns: Encoders, source: Source, where: str = "") -> None:
        """Raise a UserError if a column is missing, in all files or in some."""
        needed = [name for name, encode in columns.items() if not _takes_nothing(encode)]
        if missing := " nor ".join(name for name in needed if name not in source.column_names):
            says = f"task.dataset={self.dataset}: no column {missing}{where and f' in {where}'}"
            says += f"; its columns are {listed(source.column_names)}"
            if where == PART_NAMES["eval"]:
                says += ". Are they kept back, as at Kaggle? Without that file, a part of the rows to train on is kept"
            raise UserError(says)
        lacking = [(shard.url, [name for name in needed if name not in shard.columns]) for shard in source.shards]
        refuse(f"{url}: no column {' nor '.join(names)}, as other files have" for url, names in lacking if names)

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


def cached_map(rows: Dataset, function: Callable[..., Rows], desc: str, **options: Any) -> Dataset:
    """Return what `function` makes of batches of all columns; the second time, even in another process, from the cache,
    as long as the rows, the function with its arguments (a partial's, or its object's fields) and CODE are the same."""
    key = Hasher.hash([rows._fingerprint, function, CODE])
    names = rows.column_names
    with bar(desc, total=len(rows)) as progress:

        def counted(batch: Rows) -> Rows:
            progress.update(len(batch[names[0]]))
            return function(batch)

        return rows.map(counted, batched=True, remove_columns=names, new_fingerprint=key, **options)


def cache_folder() -> Path:
    """Return the folder that keeps indexes, rows and blocks of tokens."""
    return Path(datasets.config.HF_DATASETS_CACHE) / "rows"


def _takes_nothing(encode: Any) -> bool:
    """Return whether a column with this encoder may be missing."""
    try:
        encode(None)
    except ValueError:
        return False
    return True


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
