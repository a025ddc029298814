"""A checkpoint on disk: what it says about its run, and how its files are written and published."""

import hashlib
import json
import os
import re
import shutil
from dataclasses import fields
from pathlib import Path
from typing import Any

from src.config.errors import UserError, naming
from src.training.progress import Progress
from src.training.state import FORMAT_VERSION, Origin, RunState

MANIFEST = "manifest.json"
STATE = "state.json"
INCOMPLETE = "tmp_"
"""Prefix of the names of folders that are being written or deleted; a crash leaves them behind."""
NESTED: dict[str, Any] = {"progress": Progress, "origin": Origin}
"""Parts of state.json that have fields of their own."""
Json = dict[str, Any]
"""A JSON object."""


def is_checkpoint(name: str) -> bool:
    """Return whether a folder of this name is a checkpoint, not a copy of one by the name of step_00000500.bak."""
    return re.fullmatch(r"step_\d{8,}", name) is not None


def step_of(checkpoint: Path) -> int:
    """Return the step that the folder's name gives."""
    return int(checkpoint.name.removeprefix("step_"))


def read_state(checkpoint: Path) -> RunState:
    """Return its state.json; raise a UserError if that has another version of the format."""
    content = json.loads((checkpoint / STATE).read_bytes())
    version = content.get("format_version", "none")
    known = {f.name for f in fields(RunState)}
    found = {*content}
    for part, kind in NESTED.items():
        known |= {f"{part}.{f.name}" for f in fields(kind)}
        found |= {f"{part}.{name}" for name in content.get(part, {})}
    differing = sorted(known ^ found)
    if version != FORMAT_VERSION or differing:
        fault = f" with other fields ({', '.join(differing)})" if version == FORMAT_VERSION else ""
        raise UserError(
            f"{checkpoint} has format version {version}{fault}, and this code reads version {FORMAT_VERSION}: "
            f"use the code that saved it, or begin a new run"
        )
    parts = {part: kind(**content[part]) for part, kind in NESTED.items()}
    return RunState(**content | parts)


def unfinished(path: Path) -> Path:
    """Return where a file or folder is written until it is complete."""
    return path.with_name(f"{INCOMPLETE}{path.name}")


def share(file: Path) -> None:
    """Let whoever may enter its folder read the file: safetensors writes it for its owner alone, whatever the umask."""
    file.chmod(file.stat().st_mode | file.parent.stat().st_mode & 0o666)


def file_facts(file: Path) -> Json:
    """Return the file's entry in the manifest: size in bytes and SHA-256."""
    with file.open("rb") as stream:
        digest = hashlib.file_digest(stream, "sha256")
    return {"bytes": file.stat().st_size, "sha256": digest.hexdigest()}


def write_json(file: Path, content: Any) -> None:
    """Write `content` as JSON, as `write_text` does."""
    write_text(file, json.dumps(content, indent=2) + "\n")


def write_text(file: Path, text: str) -> None:
    """Write the file whole or not at all, no matter when the process or the machine stops."""
    incomplete = unfinished(file)
    with naming(incomplete), incomplete.open("wb") as stream:
        stream.write(text.encode())
        stream.flush()
        os.fsync(stream.fileno())
    incomplete.replace(file)


def publish(incomplete: Path, files: Json, checkpoint: Path) -> None:
    """Write the manifest, with these entries, into a folder that lacks nothing else, and rename that to `checkpoint`;
    raise an OSError if that exists."""
    write_json(incomplete / MANIFEST, {"files": files})
    sync(incomplete)
    incomplete.rename(checkpoint)  # refuses to replace a folder with something in it
    sync(checkpoint.parent)


def remove_incomplete(checkpoints: Path) -> None:
    """Delete what crashes left unfinished."""
    for path in checkpoints.glob(f"{INCOMPLETE}*"):
        shutil.rmtree(path, ignore_errors=True)


def sync(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    os.fsync(descriptor)
    os.close(descriptor)
