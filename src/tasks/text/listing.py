"""Data files, local or wherever fsspec lists them, and their versions."""

import re
from pathlib import Path

import fsspec

KINDS = (".txt", ".jsonl", ".json", ".csv", ".tsv", ".parquet")
TOGETHER = {".jsonl", ".parquet"}
"""Kinds that a folder may mix: values in both have types."""
VERSIONS = (
    "ETag", "etag", "blob_id", "md5Hash", "Content-MD5", "Digest", "generation", "mtime", "LastModified",
    "Last-Modified", "created",
)  # fmt: skip
"""What file systems call a value that changes with a file's content. `created` of a local file is the time of its last
change: unlike `mtime`, no copying tool sets it back, but a new hard link or new permissions change it too."""


def path_error(path: Path) -> str | None:
    """Return why a local file or folder cannot be a dataset, without reading rows; None if it may be one."""
    if any((path / name).is_file() for name in ("dataset_dict.json", "state.json")):
        return "was written by Dataset.save_to_disk: write its rows with to_parquet or to_json, and name that file"
    kinds = {Path(file).suffix.lower() for file in list_files(str(path))}
    if kinds and (len(kinds) == 1 or kinds <= TOGETHER):
        return None
    return f"must be a file, or a folder of files, of one of the kinds {', '.join(KINDS)}"


def list_files(url: str) -> dict[str, str]:
    """Return the files of KINDS at a URL, each with its version. Skip hidden ones, where a part of the path below the
    URL begins with a dot or an underscore, such as editors' backups and what is written beside a download."""
    system, path = fsspec.core.url_to_fs(url)
    system.invalidate_cache()
    files = {}
    for name, info in sorted(system.find(path, detail=True).items()):
        is_hidden = re.search("(^|/)[._]", name.removeprefix(path))
        if not is_hidden and name.lower().endswith(KINDS):
            full_name = name if "file" in system.protocol else system.unstrip_protocol(name)
            # an HTTP listing says only that a file exists, and a local one gives the times of a link itself
            is_enough = any(key in info for key in VERSIONS) and not info.get("islink")
            facts = info if is_enough else system.info(name)
            files[full_name] = " ".join(f"{key}={facts[key]}" for key in ("size", *VERSIONS) if key in facts)
    return files


def lasting(version: str) -> str:
    """Return the part of a version that changes with the content alone."""
    return version.partition(" created=")[0] if " mtime=" in version else version
