"""Local files with rows of text: which split each belongs to, and how each kind is read."""

import csv
import glob
import hashlib
import re
from pathlib import Path
from typing import Any

from datasets import Dataset, Features, Value, load_dataset

from src.config.errors import UserError, cause, explained
from src.config.terminal import bar

LOADERS = {".txt": "text", ".jsonl": "json", ".json": "json", ".csv": "csv", ".tsv": "csv", ".parquet": "parquet"}
DIALECTS: dict[str, dict[str, Any]] = {".csv": {"sep": ","}, ".tsv": {"sep": "\t", "quoting": csv.QUOTE_NONE}}
"""In a .tsv, quotes are text too."""
EVALUATION = ("validation", "valid", "val", "dev", "eval", "evaluation", "test")
"""Names of an evaluation split; the first one present is used."""


def path_error(path: Path) -> str | None:
    """Return why a file or folder cannot be a dataset, found without reading it; None if it may be one."""
    known = ", ".join(LOADERS)
    if not path.is_dir():
        return None if path.suffix.lower() in LOADERS else f"{path.suffix or 'no suffix'} is none of {known}"
    used = [file for files in files_by_split(path).values() for file in files]
    if len({file.suffix.lower() for file in used}) != 1:
        found = "files of several kinds" if used else "no file"
        return f"the folder has {found}; it must hold files of one of {known}"
    if unused := ", ".join(file.name for file in _readable(path) if file not in used):
        return f"the names of other files say their split, but not {unused}: rename or move away what is not to be used"
    return None


def files_by_split(path: Path) -> dict[str, list[Path]]:
    """Return the files whose names say their split; where none does, all are to train on."""
    if not path.is_dir():
        return {"train": [path]}
    files = _readable(path)
    splits: dict[str, list[Path]] = {}
    for file in files:
        words = [re.sub("(?<=.{3})(ing|set|data|split)$", "", w) for w in re.split(r"[^a-z]+", file.stem.lower())]
        if named := [word for word in words if word in ("train", *EVALUATION)]:
            splits.setdefault(named[-1], []).append(file)  # train_test_split_test.csv
    return splits or {"train": files}


def _readable(folder: Path) -> list[Path]:
    """Return the files of known kinds. Hidden ones, such as backups of editors and what macOS writes beside a file, are
    none."""
    return sorted(file for file in folder.glob("[!.]*") if file.suffix.lower() in LOADERS)


def read_files(files: list[Path], column_names: list[str]) -> Dataset:
    """Return the rows of files of one kind. Every column of a .csv or .tsv is text as it stands there: "null" and "NA"
    are words; `column_names` are its columns if it has no header. Raise a UserError if a file cannot be read or has no
    row."""
    if empty := [file for file in files if file.stat().st_size == 0]:
        raise UserError(f"task.dataset={empty[0]}: the file is empty")
    suffix, names = files[0].suffix.lower(), [glob.escape(str(file)) for file in files]
    options: dict[str, Any] = {"sample_by": "document", "encoding": "utf-8-sig"} if suffix == ".txt" else {}
    if suffix in DIALECTS:
        columns = [_columns(file, column_names, **DIALECTS[suffix]) for file in files]
        text = Features({name: Value("string") for name in columns[0]})
        options = {"features": text, "na_filter": False, "encoding": "utf-8-sig", **DIALECTS[suffix]}
        options["column_names"] = column_names or None
    elif column_names:
        raise UserError(f"task.column_names is for .csv and .tsv files, and {files[0]} is neither")
    try:
        with bar(f"reading {files[0].name}"):
            content = " ".join(map(_checksum, files)).encode()  # else the cache goes by path and time alone
            cache = hashlib.sha256(content).hexdigest()
            return load_dataset(LOADERS[suffix], cache, data_files=names, split="train", **options)
    except Exception as error:  # of many kinds: pandas', arrow's, those of datasets
        reason = cause(error.__cause__ or error)[:200]
        says = "no row in it" if "corresponds to no data" in str(error) else f"cannot be read, {reason}"
        raise UserError(f"task.dataset={files[0] if len(files) == 1 else files[0].parent}: {says}") from error


def _columns(file: Path, column_names: list[str], sep: str, quoting: Any = csv.QUOTE_MINIMAL) -> list[str]:
    """Return a table's columns. Raise a UserError if they do not fit `column_names` or the first row."""
    csv.field_size_limit(2**31 - 1)  # as in pandas, which has no limit
    refusal = explained(f"task.dataset={file}: cannot be read, ", (OSError, UnicodeDecodeError, csv.Error))
    with refusal, file.open(newline="", encoding="utf-8-sig") as stream:
        rows = (row for row in csv.reader(stream, delimiter=sep, quoting=quoting) if row)  # pandas skips them too
        header, row = next(rows, []), next(rows, [])
    if column_names and len(column_names) != len(header):
        raise UserError(f"task.column_names has {len(column_names)} names, but {file} has {len(header)} columns")
    if len(header) == 1 and not column_names and re.search("[;\t|]", header[0]):
        says = f"its only column would be {header[0]!r}: separate fields by {'commas' if sep == ',' else 'tabs'}"
        raise UserError(f"task.dataset={file}: {says}")
    if len(row) > len(header):  # pandas would take the first field for the row's name
        says = f"row 1 has {len(row)} fields, and the header {len(header)}: fix such rows; quote texts with {sep!r}"
        raise UserError(f"task.dataset={file}: {says}")
    names = column_names or [name or f"Unnamed: {i}" for i, name in enumerate(header)]  # as pandas calls it
    if len(set(names)) < len(names):
        raise UserError(f"task.dataset={file}: two of its columns have the same name")
    return names


def _checksum(file: Path) -> str:
    with file.open("rb") as stream:
        digest = hashlib.sha256()
        while chunk := stream.read(2**20):
            digest.update(chunk)
    return digest.hexdigest()
