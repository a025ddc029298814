"""The files of a run: read its output folder and its checkpoints, write files whole or not at all."""

import contextlib
import hashlib
import json
import os
import re
import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from pydantic import JsonValue, TypeAdapter
from ruamel.yaml.error import YAMLError

from src.config.config import Config
from src.config.errors import as_run_error, naming, raise_if_any
from src.config.settings import read_yaml

MANIFEST = "manifest.json"
STATE = "state.json"
INCOMPLETE = "tmp_"
"""Prefix of names of files and folders that are being written or deleted. A crash leaves them behind."""
MAX_BYTES = 2**28
"""Most bytes of a file, or of a line of metrics.jsonl, that are parsed. state.json grows to some MB in a long run."""
Json = dict[str, Any]
"""A JSON object."""
JSON_OBJECT = TypeAdapter(dict[str, JsonValue])
"""Refuses what is nested deeper than 255 levels, which code that follows would not survive."""


def reading(file: Path) -> contextlib.AbstractContextManager[None]:
    """Turn whatever is found wrong with a file's contents into a RunError that names it."""
    return as_run_error(f"{file} is damaged: ")


def read_regular(file: Path) -> bytes:
    """Return the contents of a file. Raise a ValueError if it is a link, a pipe or device, on which a reader would
    wait, or larger than MAX_BYTES."""
    if file.stat().st_size > MAX_BYTES or file.is_symlink() or not file.is_file():
        raise ValueError
    return file.read_bytes()


def json_object(content: str | bytes) -> Json:
    """Return a JSON object; an empty one if the content is anything else."""
    with contextlib.suppress(ValueError, RecursionError):
        return JSON_OBJECT.validate_python(json.loads(content))
    return {}


def read_json(file: Path) -> Json:
    """Return the JSON object in a file, whoever wrote it; an empty one if there is none."""
    with contextlib.suppress(FileNotFoundError, NotADirectoryError, ValueError):
        return json_object(read_regular(file))
    return {}


def saved_settings(folder: Path) -> Json:
    """Return the settings of the run in an output folder; an empty object if there are none."""
    with contextlib.suppress(OSError, ValueError, YAMLError):
        return json_object(json.dumps(read_yaml(read_regular(folder / "config.yaml")), default=str))
    return {}


def parent_checkpoint(config: Config) -> Path | None:
    """Return the checkpoint that the run branches off from: the one in `resume`, or in the config.yaml of its first
    start."""
    for resume in (config.resume, saved_settings(config.folder).get("resume")):
        if resume not in ("auto", "never", None):
            return Path(str(resume))
    return None


def is_checkpoint_name(name: str) -> bool:
    """Return whether a folder of this name is a checkpoint, unlike a copy of one named step_00000500.bak."""
    return re.fullmatch(r"step_[0-9]{8,}", name) is not None


def step_of(checkpoint: Path) -> int:
    """Return the step in a checkpoint's name."""
    return int(checkpoint.name.removeprefix("step_"))


def newest_first(paths: Iterable[Path]) -> list[Path]:
    """Return those of the paths that have the name of a checkpoint, newest first."""
    return sorted((path for path in paths if is_checkpoint_name(path.name)), key=step_of, reverse=True)


def list_checkpoints(checkpoints: Path) -> list[Path]:
    """Return the checkpoints in a folder, intact or damaged, newest first."""
    return newest_first(filter(Path.is_dir, checkpoints.glob("step_*")))


def incomplete_path(path: Path) -> Path:
    """Return where to write a file or folder until it is complete."""
    return path.with_name(f"{INCOMPLETE}{path.name}")


def make_readable(folder: Path) -> None:
    """Let whoever can read the folder read the weights: safetensors ignores the umask and lets only the owner read."""
    for file in folder.rglob("*.safetensors"):
        with contextlib.suppress(OSError):  # some file systems, such as blobfuse, have no permissions
            file.chmod(file.stat().st_mode | folder.stat().st_mode & 0o666)


def file_facts(file: Path) -> Json:
    """Return a file's entry in the manifest: size in bytes and SHA-256."""
    with file.open("rb") as stream:
        digest = hashlib.file_digest(stream, "sha256")
    return {"bytes": file.stat().st_size, "sha256": digest.hexdigest()}


def json_text(content: Any, **layout: Any) -> str:
    """Return `content` as JSON, which has no NaN and no infinity: they become null."""
    return json.dumps(json.loads(json.dumps(content), parse_constant=lambda _: None), **layout)


def write_json(file: Path, content: Any) -> None:
    """Write `content` as JSON, as `json_text` does, whole or not at all."""
    write_text(file, json_text(content, indent=2) + "\n")


def write_text(file: Path, text: str) -> None:
    """Write the file whole or not at all, no matter when the process or the machine stops."""
    incomplete = incomplete_path(file)
    discard(incomplete)
    with naming(incomplete):
        with incomplete.open("xb") as stream:
            stream.write(text.encode())
        sync(incomplete)
    incomplete.replace(file)


def publish(incomplete: Path, files: Json, checkpoint: Path) -> None:
    """Add the manifest, with these entries, to an otherwise complete folder, and rename the folder to `checkpoint`.
    Raise an OSError if that exists."""
    make_readable(incomplete)
    write_json(incomplete / MANIFEST, {"files": files})
    sync(incomplete)
    incomplete.rename(checkpoint)  # refuses to replace a folder that is not empty
    sync(checkpoint.parent)


def sync(path: Path) -> None:
    """Flush a file or folder to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError:
        if not path.is_dir():  # some file systems, such as CIFS, only flush files
            raise
    finally:
        os.close(descriptor)


def planted(path: Path) -> Iterator[str]:
    """Yield an error line if this is a link that another user has made in someone else's folder: it may lead to a
    place of that user's choice. The rule is that of Linux's protected_symlinks."""
    if path.is_symlink() and path.lstat().st_uid not in (0, os.geteuid(), path.parent.stat().st_uid):
        yield f"cannot write to {path}, another user's link: remove it"


def discard(path: Path) -> None:
    """Delete a folder, a file or a link, but not what the link leads to."""
    shutil.rmtree(path, ignore_errors=True)
    with contextlib.suppress(OSError):
        path.unlink()


def new_folder(folder: Path) -> None:
    """Make an empty folder, in place of what a crash or another user left there. Raise a UserError or an OSError if
    that cannot be."""
    raise_if_any(planted(folder.parent))
    discard(folder)
    folder.mkdir(parents=True)


def remove_incomplete(checkpoints: Path) -> None:
    """Delete what crashes left behind."""
    for path in checkpoints.glob(f"{INCOMPLETE}*"):
        discard(path)
