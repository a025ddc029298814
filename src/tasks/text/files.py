"""Local files with rows of text: which split each belongs to, and how each kind is read."""

import csv
import glob
import hashlib
import re
import warnings
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
from datasets import Dataset, load_dataset
from pandas.errors import ParserWarning

from src.config.errors import UserError, cause
from src.config.terminal import bar

LOADERS = {".txt": "text", ".jsonl": "json", ".json": "json", ".csv": "csv", ".tsv": "csv", ".parquet": "parquet"}
TABLE = {"na_filter": False, "index_col": False, "encoding": "utf-8-sig"}
"""pandas' options: "null" and "NA" are words, and no column is one of names."""
OPTIONS: dict[str, dict[str, Any]] = {
    ".txt": {"sample_by": "document", "encoding": "utf-8-sig"},
    ".csv": TABLE,
    ".tsv": TABLE | {"sep": "\t", "quoting": csv.QUOTE_NONE},
}
"""In a .tsv, quotes are text too."""
EVALUATION = ("validation", "valid", "val", "dev", "eval", "test")
"""Names of an evaluation split; the first one present is used."""
SPLITS = {"train": "train", "val": "validation", "dev": "validation", "eval": "test", "test": "test"}
"""Beginnings of words in the names of files, and the split that such a file belongs to."""


def path_error(path: Path) -> str | None:
    """Return why a file or folder cannot be a dataset, found without reading it; None if it may be one."""
    kinds = {file.suffix.lower() for files in files_by_split(path).values() for file in files}
    if len(kinds) == 1 and kinds <= {*LOADERS}:
        return None
    return f"must be a file, or a folder with files, of one of the kinds {', '.join(LOADERS)}"


def files_by_split(path: Path) -> dict[str, list[Path]]:
    """Return the files whose names say their split; where none does, all are to train on. Hidden ones are none, such as
    backups of editors and what macOS writes beside a file."""
    if not path.is_dir():
        return {"train": [path]}
    return by_split(sorted(file for file in path.glob("[!.]*") if file.suffix.lower() in LOADERS))


def by_split(files: Iterable[Any]) -> dict[str, list[Any]]:
    """Return files, or URLs of such, by the split that their names say; where none does, all are to train on."""
    files = [*files]
    splits: dict[str, list[Any]] = {}
    for file in files:
        if named := re.findall(rf"(?:^|[^a-z])({'|'.join(SPLITS)})", Path(file).stem.lower()):
            splits.setdefault(SPLITS[named[-1]], []).append(file)  # train_test_split_test.csv
    return splits or {"train": files}


def read_files(files: list[Path], column_names: list[str]) -> Dataset:
    """Return the rows of files of one kind; `column_names` are the columns of a .csv or .tsv without a header. Raise a
    UserError if a file cannot be read or has no row."""
    suffix, names = files[0].suffix.lower(), [glob.escape(str(file)) for file in files]
    options = OPTIONS.get(suffix, {}) | ({"column_names": column_names} if column_names else {})
    try:
        with bar(f"reading {files[0].name}"), warnings.catch_warnings():
            warnings.simplefilter("error", ParserWarning)  # rows have more fields than the header: the rest is lost
            content = hashlib.sha256()  # else the cache goes by path and time alone
            for file in files:
                content.update(np.memmap(file, mode="r").data)
            return load_dataset(LOADERS[suffix], content.hexdigest(), data_files=names, split="train", **options)
    except Exception as error:  # of many kinds: pandas', arrow's, those of datasets
        reason = cause(error.__cause__ or error)[:200]
        raise UserError(f"task.dataset={files[0] if len(files) == 1 else files[0].parent}: {reason}") from error
