"""Local files with rows of text: which split each belongs to, and how each kind is read."""

import csv
import glob
import hashlib
import re
from pathlib import Path
from typing import Any

from datasets import Dataset, Features, Value, load_dataset
from datasets.fingerprint import Hasher

from src.config.errors import UserError, cause, explained
from src.config.terminal import bar

LOADERS = {".txt": "text", ".jsonl": "json", ".json": "json", ".csv": "csv", ".tsv": "csv", ".parquet": "parquet"}
DIALECTS: dict[str, dict[str, Any]] = {".csv": {"sep": ","}, ".tsv": {"sep": "\t", "quoting": csv.QUOTE_NONE}}
"""In a .tsv, quotes are text too."""
PACKED = (".gz", ".zip", ".bz2", ".xz", ".zst")
SAVED_TO_DISK = ("dataset_info.json", "dataset_dict.json")
"""One of them is in each folder that datasets' save_to_disk wrote."""
EVALUATION = ("validation", "valid", "val", "dev", "eval", "evaluation", "test")
"""Names of an evaluation split; the first one present is used."""


def path_error(path: Path) -> str | None:
    """Return why a file or folder cannot be a dataset, found without reading it; None if it may be one."""
    known = ", ".join(LOADERS)
    if not path.is_dir():
        return None if path.suffix.lower() in LOADERS else f"{path.suffix or 'no suffix'} is none of {known}"
    if saved := [name for name in SAVED_TO_DISK if (path / name).is_file()]:
        hint = "write each split with to_parquet, as train.parquet and validation.parquet"
        return f"was written by save_to_disk ({saved[0]}), which is not read: {hint}"
    used = [file for files in files_by_split(path).values() for file in files]
    kinds = {file.suffix.lower() for file in used}
    if len(kinds) != 1:
        found = "files of several kinds" if kinds else "no file"
        return f"the folder has {found}; it must hold files of one of {known}"
    others = [file for file in sorted([*path.glob("[!.]*"), *path.glob("[!.]*/[!.]*")]) if file not in used]
    if unsaid := ", ".join(file.name for file in others if file.parent == path and file.suffix.lower() in kinds):
        return f"the names of other files say their split, but not {unsaid}: rename or move away what is not to be used"
    for file in others:
        unpacked = file.with_suffix("") if file.suffix.lower() in PACKED else file
        if unpacked.suffix.lower() in kinds:
            return f"{file.relative_to(path)} is not read: unpack it, or move it into the folder, or away"
    return None


def files_by_split(path: Path) -> dict[str, list[Path]]:
    """Return the files whose names say their split; where none does, all are to train on. Hidden ones, such as backups
    of editors and what macOS writes beside a file, are none."""
    if not path.is_dir():
        return {"train": [path]}
    files = sorted(file for file in path.glob("[!.]*") if file.suffix.lower() in LOADERS)
    splits: dict[str, list[Path]] = {}
    for file in files:
        words = [re.sub("(?<=.{3})(ing|set|data|split)$", "", w) for w in re.split(r"[^a-z]+", file.stem.lower())]
        if named := [word for word in words if word in ("train", *EVALUATION)]:
            splits.setdefault(named[-1], []).append(file)  # train_test_split_test.csv
    return splits or {"train": files}


def read_files(files: list[Path], column_names: list[str]) -> Dataset:
    """Return the rows of files of one kind. Every column of a .csv or .tsv is text as it stands there: "null" and "NA"
    are words; `column_names` are its columns if it has no header. Raise a UserError if a file cannot be read, has no
    row, or lacks a column that it should have."""
    if empty := [file for file in files if file.stat().st_size == 0]:
        raise UserError(f"task.dataset={empty[0]}: the file is empty")
    suffix, names = files[0].suffix.lower(), [glob.escape(str(file)) for file in files]
    options: dict[str, Any] = {"sample_by": "document", "encoding": "utf-8-sig"} if suffix == ".txt" else {}
    if suffix in DIALECTS:
        columns, *others = [_columns(file, column_names, **DIALECTS[suffix]) for file in files]
        for file, found in zip(files[1:], others, strict=True):
            if absent := [name for name in columns if name not in found]:
                raise UserError(f"task.dataset={file}: has no column {absent[0]}, which {files[0]} has")
        text = Features({name: Value("string") for name in columns})
        options = {"features": text, "na_filter": False, "encoding": "utf-8-sig", **DIALECTS[suffix]}
        options["column_names"] = column_names or None
    elif column_names:
        raise UserError(f"task.column_names is for .csv and .tsv files, and {files[0]} is neither")
    try:
        with bar(f"reading {files[0].name}"):
            content = Hasher.hash(
                [(file.stat().st_size, _checksum(file)) for file in files]
            )  # else the cache goes by path and time alone
            return load_dataset(LOADERS[suffix], content, data_files=names, split="train", **options)
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
    names = column_names or [name or f"Unnamed: {i}" for i, name in enumerate(header)]  # as pandas calls it
    if len(names) != len(header):
        raise UserError(f"task.column_names has {len(names)} names, but {file} has {len(header)} columns")
    if column_names == header:
        raise UserError(f"task.column_names: {file} has that header itself; leave them out")
    if len(header) == 1 and not column_names and (other := re.search("[;\t|]", header[0])):
        expected = "commas" if sep == "," else "tabs"
        says = f"its only column would be {header[0]!r}: separate fields by {expected}, not by {other[0]!r}"
        raise UserError(f"task.dataset={file}: {says}")
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise UserError(f"task.dataset={file}: the column {twice[0]} appears twice")
    if len(row) > len(names):  # pandas would take the first field for the row's name
        says = f"row 1 has {len(row)} fields, and the header {len(names)}: fix such rows; quote texts with {sep!r}"
        raise UserError(f"task.dataset={file}: {says}")
    return names


def _checksum(file: Path) -> str:
    digest = hashlib.sha256()
    with file.open("rb") as stream:
        while chunk := stream.read(2**20):
            digest.update(chunk)
    return digest.hexdigest()
