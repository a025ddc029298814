"""Whether the files of a checkpoint are as they were saved, and what happens to one that is damaged."""

import itertools
import json
from collections.abc import Iterator
from pathlib import Path

from accelerate import Accelerator
from accelerate.utils import gather_object

from src.checkpoint.format import MANIFEST, STATE, Json, file_facts
from src.checkpoint.store import Store
from src.config.config import Config
from src.config.errors import UserError, refuse

RECORD = ("metrics.jsonl", "config.yaml")
"""Files of the run that a mirror keeps beside each checkpoint."""
Damaged = dict[Path, str]
"""Damaged checkpoints, with what is wrong with each."""


def manifest(checkpoint: Path) -> Json:
    """Return the facts about each of its files, by name."""
    return json.loads((checkpoint / MANIFEST).read_bytes())["files"]


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
            progress = dict(json.loads((checkpoint / name).read_bytes()).get("progress", ()))
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


def require_whole(checkpoint: Path) -> None:
    """Raise a UserError if it is damaged."""
    if wrong := next(problems(checkpoint), None):
        raise UserError(f"{checkpoint}: {wrong}")


def first_valid(accelerator: Accelerator, candidates: list[Path], store: Store) -> tuple[Path | None, Damaged]:
    """Return the first whole one of the candidates, which are the same on all processes, and what is wrong with those
    before it. Collective: each process reads its share of the files. What one lacks is fetched from elsewhere."""
    damaged: Damaged = {}
    share = accelerator.process_index, accelerator.num_processes
    for checkpoint in candidates:
        wrong = gather_object(list(problems(checkpoint, share=share)))
        checkpoint, wrong = store.fetch(checkpoint, wrong)
        if not wrong:
            return checkpoint, damaged
        damaged[checkpoint] = wrong[0]
    return None, damaged


def require_none_damaged(config: Config, damaged: Damaged) -> None:
    """Raise a UserError if there are checkpoints, all of them damaged."""
    if damaged:
        lines = [f"{path}: {why}" for path, why in damaged.items()]
        advice = "choose another --resume"
        if (config.folder / "checkpoints").exists():
            advice = f"move {config.folder} away to start over"
        advice += "" if config.checkpoint.mirror else ", or set checkpoint.mirror if the run had one"  # room: machines
        refuse([*lines, f"no valid checkpoint to continue from: {advice}"])


def passed_over(config: Config, damaged: Damaged) -> list[str]:
    """Return a note about each damaged checkpoint, by what is wrong with it."""
    done = "passed over and set aside" if config.saves else "passed over"
    return [f"{done}: {path}, {why}" for path, why in damaged.items()]


def quarantine(checkpoint: Path) -> None:
    """Rename a damaged checkpoint, so that it neither counts as one to keep nor blocks the next one of its step."""
    names = (checkpoint.with_name(f"damaged_{number}_{checkpoint.name}") for number in itertools.count(1))
    checkpoint.rename(next(path for path in names if not path.exists()))
