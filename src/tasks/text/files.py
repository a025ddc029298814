"""Files with rows, here or wherever fsspec reads: which there are, their versions, and the split each belongs to."""

import os
import re
import time
from collections.abc import Callable, Iterable
from pathlib import Path, PurePosixPath
from typing import Any, TypeVar

import fsspec
from datasets import load_dataset_builder
from huggingface_hub import metadata_load

from src.config.errors import RunError, UserError, cause

T = TypeVar("T")
Splits = dict[str, list[str]]
"""Names of files, by the split that they are of."""
KINDS = (".txt", ".jsonl", ".json", ".csv", ".tsv", ".parquet")
TOGETHER = {".jsonl", ".parquet"}
"""Kinds that a folder may mix: values in both have types."""
EVALUATION = ("validation", "valid", "val", "dev", "eval", "test")
"""Names of an evaluation split; the first one present is used."""
SPLITS = {"train": "train", "val": "validation", "dev": "validation", "eval": "test", "test": "test"}
"""Beginnings of words in the names of files, and the split that such a file belongs to."""
SPLIT_WORD = re.compile(rf"(?:^|[^a-z])({'|'.join(SPLITS)})")
FOLDERS = ("train", "training", *EVALUATION)
"""Names of folders that say the split of the files in them."""
WAITS = (0.5, 1.0, 2.0, 4.0, 8.0)
"""Seconds to wait after each failure to read, before the next try."""
LASTING = (FileNotFoundError, PermissionError, IsADirectoryError, ImportError, ValueError)
"""Errors that another try would not mend; pyarrow's ArrowInvalid is a ValueError."""
VERSIONS = (
    "ETag", "etag", "blob_id", "md5Hash", "Content-MD5", "Digest", "generation", "mtime", "LastModified",
    "Last-Modified", "created",
)  # fmt: skip
"""What file systems call that which changes with a file's content. `created` of a local file is the time of its last
change, which, unlike `mtime`, no copying tool sets back, but a hard link or other permissions are changes too."""


def path_error(path: Path) -> str | None:
    """Return why a local file or folder cannot be a dataset, found without reading rows; None if it may be one."""
    if any((path / name).is_file() for name in ("dataset_dict.json", "state.json")):
        return "is a folder of Dataset.save_to_disk: write its rows by to_parquet or to_json, and name those"
    kinds = {Path(file).suffix.lower() for file in list_files(str(path))}
    if kinds and (len(kinds) == 1 or kinds <= TOGETHER):
        return None
    return f"must be a file, or a folder with files, of one of the kinds {', '.join(KINDS)}"


def find_files(url: str) -> dict[str, str]:
    """Return the files with rows in a folder and those below it, or the only one, each with its version. Raise a
    UserError if there are none."""
    files = patiently(f"task.dataset={url}", lambda: list_files(url))
    if not files:
        raise UserError(f"task.dataset={url}: no file there of one of the kinds {', '.join(KINDS)}")
    return files


def list_files(url: str) -> dict[str, str]:
    """Return what is there of KINDS, each with its version. Hidden files are none: whose names, or folders' below this
    one, begin with a dot or an underscore, such as backups of editors and what is written beside a download."""
    system, path = fsspec.core.url_to_fs(url)
    system.invalidate_cache()
    files = {}
    for name, info in sorted(system.find(path, detail=True).items()):
        inner = name.removeprefix(path).strip("/").split("/")
        is_hidden = any(part.startswith((".", "_")) for part in inner)
        if not is_hidden and name.lower().endswith(KINDS):
            full_name = name if "file" in system.protocol else system.unstrip_protocol(name)
            # a listing by HTTP says of a file that it is there, no more, and a local one tells a link's own times
            is_enough = any(key in info for key in VERSIONS) and not info.get("islink")
            facts = info if is_enough else system.info(name)
            files[full_name] = " ".join(f"{key}={facts[key]}" for key in ("size", *VERSIONS) if key in facts)
    return files


def lasting(version: str) -> str:
    """Return that part of a version which changes with the content alone."""
    return version.partition(" created=")[0] if " mtime=" in version else version


def by_split(files: Iterable[str]) -> Splits:
    """Return the files of a folder by the split that their names say, or those of the folders in it; where none does,
    all are to train on."""
    files = [*files]
    splits: Splits = {}
    depth = len(PurePosixPath(os.path.commonpath([PurePosixPath(file).parent for file in files])).parts)
    for file in files:
        *folders, _ = PurePosixPath(file).parts[depth:]
        words = [*(folder for folder in folders if folder.lower() in FOLDERS), PurePosixPath(file).stem]
        if named := SPLIT_WORD.findall(" ".join(words).lower()):
            splits.setdefault(SPLITS[named[-1]], []).append(file)  # train_test_split_test.csv
    return splits or {"train": files}


def declared_splits(folder: str, config: str | None) -> Splits | None:
    """Return the files of a folder by split, as its dataset card declares them: a folder as `hf download` leaves it may
    have several configurations. None if there is no card, or it declares none."""
    card = Path(folder, "README.md")
    if not card.is_file() or "configs" not in (metadata_load(card) or {}):
        return None
    return splits_of(folder, config)


def splits_of(dataset: str, config: str | None) -> Splits:
    """Return the files of a dataset on the Hub, or in a folder, by split, as `datasets` finds them."""
    found: Any = load_dataset_builder(dataset, config).config.data_files or {}
    return {str(split): [*names] for split, names in found.items()}


def patiently(url: str, read: Callable[[], T]) -> T:
    """Return what `read` does, tried again after longer and longer waits if it fails; raise a RunError at last. Raise a
    UserError at once if it failed for good."""
    for wait in (*WAITS, None):
        try:
            return read()
        except UserError:
            raise
        except Exception as error:  # of aiohttp's, botocore's and many others' kinds
            if isinstance(error, LASTING) or "Credential" in type(error).__name__:
                raise UserError(f"{url}: cannot be read, {cause(error)[:200]}") from error
            if wait is None:
                says = f"cannot be read, tried {len(WAITS) + 1} times, {cause(error)[:200]}"
                raise RunError(f"{url}: {says}") from error
            time.sleep(wait)
    raise AssertionError
