"""A checkpoint on disk: what it says about its run, how it is published, whether it is whole, which are kept."""

import hashlib
import itertools
import json
import os
import shutil
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

from src.checkpoint.folder import list_checkpoints
from src.config.errors import UserError, naming
from src.training.progress import Progress
from src.training.state import FORMAT_VERSION, RunState

MANIFEST = "manifest.json"
STATE = "state.json"
RECORD = ("metrics.jsonl", "config.yaml")
"""What a mirror keeps of the run beside each checkpoint."""
INCOMPLETE = "tmp_"
"""Prefix of the names of folders that are being written or deleted; a crash leaves them behind."""


def step_of(checkpoint: Path) -> int:
    """Return the step that the folder's name gives."""
    return int(checkpoint.name.removeprefix("step_"))


def read_state(checkpoint: Path) -> RunState:
    """Return its state.json; raise a UserError if that has another version of the format."""
    content = json.loads((checkpoint / STATE).read_text())
    version = content.get("format_version", "none")
    known = {f.name for f in fields(RunState)} | {f"progress.{f.name}" for f in fields(Progress)}
    differing = sorted(known ^ {*content, *(f"progress.{name}" for name in content.get("progress", {}))})
    if version != FORMAT_VERSION or differing:
        fault = f" with other fields ({', '.join(differing)})" if version == FORMAT_VERSION else ""
        raise UserError(
            f"{checkpoint} has format version {version}{fault}, and this code reads version {FORMAT_VERSION}: "
            f"use the code that saved it, or begin a new run"
        )
    return RunState(**content | {"progress": Progress(**content["progress"])})


def manifest(checkpoint: Path) -> dict[str, Any]:
    """Return the facts about each of its files, by name."""
    return json.loads((checkpoint / MANIFEST).read_text())["files"]


def unfinished(path: Path) -> Path:
    """Return where a file or folder is written until it is complete."""
    return path.with_name(f"{INCOMPLETE}{path.name}")


def file_facts(file: Path) -> dict[str, Any]:
    """Return the file's entry in the manifest: size in bytes and SHA-256."""
    digest = hashlib.sha256()
    with file.open("rb") as stream:
        while chunk := stream.read(2**20):
            digest.update(chunk)
    return {"bytes": file.stat().st_size, "sha256": digest.hexdigest()}


def write_json(file: Path, content: Any) -> None:
    """Write `content` as JSON, as `write_text` does."""
    write_text(file, json.dumps(content, indent=2) + "\n")


def write_text(file: Path, text: str) -> None:
    """Write the file whole or not at all, no matter when the process or the machine stops."""
    incomplete = unfinished(file)
    with naming(incomplete), incomplete.open("w") as stream:
        stream.write(text)
        stream.flush()
        os.fsync(stream.fileno())
    incomplete.replace(file)


def publish(incomplete: Path, files: dict[str, Any], checkpoint: Path) -> None:
    """Write the manifest, with these entries, into a folder that lacks nothing else, and rename that to `checkpoint`;
    raise an OSError if that exists."""
    write_json(incomplete / MANIFEST, {"files": files})
    sync(incomplete)
    os.rename(incomplete, checkpoint)  # refuses to replace a folder with something in it
    sync(checkpoint.parent)


def quarantine(checkpoint: Path) -> None:
    """Rename a damaged checkpoint, so that it neither counts as one to keep nor blocks the next one of its step."""
    names = (checkpoint.with_name(f"damaged_{number}_{checkpoint.name}") for number in itertools.count(1))
    checkpoint.rename(next(path for path in names if not path.exists()))


def remove_incomplete(checkpoints: Path) -> None:
    """Delete what crashes left unfinished."""
    for path in checkpoints.glob(f"{INCOMPLETE}*"):
        shutil.rmtree(path, ignore_errors=True)


def whole_checkpoints(checkpoints: Path) -> list[Path]:
    """Return the checkpoints in a folder whose files are there, the newest first; their checksums are not compared."""
    return [path for path in list_checkpoints(checkpoints) if not any(problems(path, contents=False))]


def problems(checkpoint: Path, contents: bool = True, share: tuple[int, int] = (0, 1)) -> Iterator[str]:
    """Yield what is wrong with it, in a few words each; nothing if it is whole. A missing rng_*.json is no problem.
    Raise a UserError if it may be whole, but this user may not read it.

    Args:
        contents: whether to compare checksums too, which reads all of it.
        share: (r, n): look only at every n-th file, from the r-th on.
    """
    try:
        name = MANIFEST
        try:
            files = manifest(checkpoint)
            entries = [(file, int(facts["bytes"]), str(facts["sha256"])) for file, facts in files.items()]
            name, step = STATE, checkpoint.name.removeprefix("step_")
            progress = dict(json.loads((checkpoint / name).read_text()).get("progress", ()))
        except (FileNotFoundError, ValueError, KeyError, TypeError, AttributeError) as error:
            yield f"{name} is {'missing' if isinstance(error, FileNotFoundError) else 'damaged'}"
            return
        if step.isdigit() and progress.get("step", int(step)) != int(step):
            yield f"{name} is of step {progress['step']}: give the folder its own name back"
        there = {path.name for path in checkpoint.iterdir()}
        yield from (f"{name} does not belong to it" for name in sorted(there - files.keys() - {MANIFEST, *RECORD}))
        if STATE not in files:
            yield f"{STATE} is not in the manifest"
        for name, size, checksum in entries[share[0] :: share[1]]:
            file = checkpoint / name
            if name not in there or file.is_symlink():  # nor is a path that leads elsewhere
                if not name.startswith("rng_"):
                    yield f"{name} is missing"
            elif file.stat().st_size != size:
                yield f"{name} has {file.stat().st_size:,} bytes, not {size:,}"
            elif contents and file_facts(file)["sha256"] != checksum:
                yield f"{name} has changed since it was saved"
    except PermissionError as error:
        raise UserError(f"{error.filename} cannot be read, {error.strerror}: ask for permission to read it") from error
    except OSError as error:
        yield f"{error.filename} cannot be read, {error.strerror}"


def sync(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    os.fsync(descriptor)
    os.close(descriptor)
