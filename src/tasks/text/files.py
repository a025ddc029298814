"""Data files, local or wherever fsspec finds them: which there are, their versions, and the splits of their names."""

import re
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import TypeVar

import fsspec
from fsspec.utils import common_prefix

from src.config.errors import RunError, UserError, cause

T = TypeVar("T")
EXTENSIONS = (".txt", ".jsonl", ".json", ".csv", ".tsv", ".parquet")
TOGETHER = {".jsonl", ".parquet"}
"""Kinds that a folder may mix: values in both have types."""
VERSIONS = (
    "ETag", "etag", "blob_id", "md5Hash", "Content-MD5", "Digest", "generation", "mtime", "LastModified",
    "Last-Modified", "created",
)  # fmt: skip
"""What file systems call a value that changes with a file's content. `created` of a local file is the time of its last
change: unlike `mtime`, no copying tool sets it back, but a new hard link or new permissions change it too."""
EVALUATION = ("validation", "valid", "val", "dev", "eval", "test")
"""Names of an evaluation split; the first one present is used."""
SPLITS = {"train": "train", "val": "validation", "dev": "validation", "eval": "test", "test": "test"}
"""Prefixes of words in names of files, and the split that such a file belongs to."""
FOLDERS = ("train", "training", *EVALUATION)
"""Names of folders that tell the split of the files in them."""
SPLIT_WORD = re.compile(rf"(?:^|[^a-z])({'|'.join(SPLITS)})")
WAITS = (0.5, 1.0, 2.0, 4.0, 8.0)
"""Seconds to wait after each failed read before the next try."""
PERMANENT_ERRORS = (
    FileNotFoundError, PermissionError, IsADirectoryError, ImportError, ValueError, RecursionError, MemoryError,
)  # fmt: skip
"""Errors that another try would not fix; pyarrow's ArrowInvalid is a ValueError."""


def path_error(path: Path) -> str | None:
    """Return why a local file or folder cannot be a dataset, without reading rows; None if it may be one."""
    if any((path / name).is_file() for name in ("dataset_dict.json", "state.json")):
        return "was written by Dataset.save_to_disk: write its rows with to_parquet or to_json, and name that file"
    suffixes = {Path(file).suffix.lower() for file in list_files(str(path))}
    if suffixes and (len(suffixes) == 1 or suffixes <= TOGETHER):
        return None
    return f"must be a file, or a folder of files, of one of the kinds {', '.join(EXTENSIONS)}"


def list_files(url: str) -> dict[str, str]:
    """Return the files at a URL that have one of the EXTENSIONS, each with its version. Skip hidden ones, where a part
    of the path below the URL begins with a dot or an underscore, such as editors' backups and what is written beside a
    download."""
    system, path = fsspec.core.url_to_fs(url)
    system.invalidate_cache()
    files = {}
    for name in sorted(system.find(path)):
        is_hidden = re.search("(^|/)[._]", name.removeprefix(path))
        if not is_hidden and name.lower().endswith(EXTENSIONS):
            full_name = name if "file" in system.protocol else system.unstrip_protocol(name)
            # an HTTP listing says only that a file exists, and a local one gives the times of a link itself
            facts = system.info(name)
            files[full_name] = " ".join(f"{key}={facts[key]}" for key in ("size", *VERSIONS) if key in facts)
    return files


def content_version(version: str) -> str:
    """Return the part of a version that changes with the content alone."""
    return version.partition(" created=")[0] if " mtime=" in version else version


def find_files(url: str) -> dict[str, str]:
    """Return what `list_files` does, with retries. Raise a UserError if there are no files."""
    files = with_retries(f"task.dataset={url}", lambda: list_files(url))
    if not files:
        raise UserError(f"task.dataset={url}: no files there of the kinds {', '.join(EXTENSIONS)}")
    return files


def by_split(files: dict[str, str]) -> dict[str, dict[str, str]]:
    """Return a folder's files, given with their versions, by split: by words in their names, and by the names of
    subfolders. If no name has a split, all files are training data. Each file is in one split, that of the last word:
    `datasets` would have train_test.csv in two."""
    folder = common_prefix(file.rpartition("/")[0] for file in files)
    splits: dict[str, dict[str, str]] = {}
    for file, version in files.items():
        *folders, name = file.removeprefix(folder).lower().split("/")
        words = [*(folder for folder in folders if folder in FOLDERS), name]
        if found := SPLIT_WORD.findall(" ".join(words)):
            splits.setdefault(SPLITS[found[-1]], {})[file] = version
    return splits or {"train": files}


def with_retries(url: str, read: Callable[[], T]) -> T:
    """Return what `read` returns, in one of several attempts."""
    for attempt in attempts(url):
        with attempt:
            return read()
    raise AssertionError


def attempts(url: str) -> Iterator[AbstractContextManager[None]]:
    """Yield contexts to read a file in, one after the other until one succeeds. Each raises a UserError if another try
    would not help, and waits after any other failure, longer each time; the last one raises a RunError."""
    return (_attempt(url, wait) for wait in (*WAITS, None))


@contextmanager
def _attempt(url: str, wait: float | None) -> Iterator[None]:
    try:
        yield
    except UserError:
        raise
    except Exception as error:  # aiohttp, botocore and many others have their own kinds
        reason = cause(error)[:200]
        if isinstance(error, PERMANENT_ERRORS) or "Credential" in type(error).__name__:
            raise UserError(f"{url}: cannot be read: {reason}") from error
        if wait is None:
            raise RunError(f"{url}: cannot be read, tried {len(WAITS) + 1} times: {reason}") from error
        time.sleep(wait)
