"""Check that a checkpoint's files are as they were saved, and set damaged checkpoints aside."""

import itertools
import json
from collections.abc import Iterator
from pathlib import Path

from src.checkpoint.files import MANIFEST, STATE, Json, file_facts
from src.config.errors import UserError

RUN_COPIES = ("metrics.jsonl", "config.yaml")
"""Files of the run that a mirror keeps beside each checkpoint."""
Damaged = dict[Path, str]
"""What is wrong with each damaged checkpoint."""


def manifest(checkpoint: Path) -> Json:
    """Return a checkpoint's manifest: size and SHA-256 of each file, by name."""
    return json.loads((checkpoint / MANIFEST).read_bytes())["files"]


def problems(checkpoint: Path, contents: bool = True, shard: tuple[int, int] = (0, 1)) -> Iterator[str]:
    """Yield what is wrong with a checkpoint, in a few words each. Raise a UserError if this user may not read
    a file.

    Args:
        contents: whether to compare checksums too, which reads every file.
        shard: (r, n): check only every n-th file, starting at the r-th.
    """
    try:
        name = MANIFEST
        try:
            files = manifest(checkpoint)
            entries = [(file, int(facts["bytes"]), str(facts["sha256"])) for file, facts in files.items()]
            name, step = STATE, checkpoint.name.removeprefix("step_")
            progress = dict(json.loads((checkpoint / name).read_bytes()).get("progress", ()))
        except (FileNotFoundError, ValueError, KeyError, TypeError, AttributeError) as error:
            yield f"{name} is {'missing' if isinstance(error, FileNotFoundError) else 'damaged'}"
            return
        if step.isdigit() and progress.get("step", int(step)) != int(step):
            yield f"{name} is of step {progress['step']}: rename the folder back"
        there = {path.name for path in checkpoint.iterdir()}
        yield from (f"{name} is an unexpected file" for name in sorted(there - files.keys() - {MANIFEST, *RUN_COPIES}))
        if STATE not in files:
            yield f"{STATE} is not in the manifest"
        for name, size, checksum in entries[shard[0] :: shard[1]]:
            file = checkpoint / name
            if name not in there or file.is_symlink():  # the manifest may not lead to other folders
                yield f"{name} is missing"
            elif file.stat().st_size != size:
                yield f"{name} has {file.stat().st_size:,} bytes, not {size:,}"
            elif contents and file_facts(file)["sha256"] != checksum:
                yield f"{name} has changed since it was saved"
    except PermissionError as error:
        raise UserError(f"{error.filename} cannot be read, {error.strerror}: ask for permission to read it") from error
    except OSError as error:
        yield f"{error.filename} cannot be read, {error.strerror}"


def require_whole(checkpoint: Path) -> None:
    """Raise a UserError if the checkpoint is damaged."""
    if wrong := next(problems(checkpoint), None):
        raise UserError(f"{checkpoint}: {wrong}")


def quarantine(path: Path) -> None:
    """Rename a damaged checkpoint or file, if it exists, so that it neither counts nor blocks a new one of its name."""
    names = (path.with_name(f"damaged_{number}_{path.name}") for number in itertools.count(1))
    if path.exists():
        path.rename(next(name for name in names if not name.exists()))
