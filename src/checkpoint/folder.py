"""The output folder of a run: reading its files, which run it holds, and why this one must not write into it."""

import contextlib
import json
import math
import os
import re
import tempfile
from collections.abc import Callable, Iterator
from functools import reduce
from operator import getitem
from pathlib import Path
from typing import Any, TypeGuard

from ruamel.yaml.error import YAMLError

from src.config.config import Config, load_config
from src.config.settings import Change, fields, marked, nearest, read_yaml
from src.tasks import TASKS

RUN_FILES = ("config.yaml", "metrics.jsonl", "summary.json", "model", "checkpoints", "wandb")
"""What a run writes into its output folder, besides status.json, which even a run stopped at its start leaves."""
ELSEWHERE = "choose another --run_name or --output_dir"
LENGTH_SETTINGS = marked(Config, Change.LENGTH)
"""Settings that say how long a run is."""


def run_settings(
    argv: list[str],
    fetch: Callable[[Config, list[str]], set[str]] | None = None,  # room: wandb
) -> Config:
    """Return the settings of a run, read as `load_config` says, where nothing keeps it from writing into its folder."""
    return load_config(
        argv,
        TASKS,
        folder_errors,
        fetch,  # room: wandb
    )


def is_number(value: Any) -> TypeGuard[float]:
    """Return whether it is a finite number, not too large for a float."""
    return isinstance(value, int | float) and abs(value) < 1e308


def parse(content: str | bytes) -> dict[str, Any]:
    """Return the JSON object that is written there; an empty one if there is none."""
    try:
        found = json.loads(content)
    except (ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def read_lines(file: Path, end: float = math.inf) -> Iterator[dict[str, Any]]:
    """Yield each record of metrics.jsonl up to the byte `end`, if it is there: an empty one for a line that is damaged,
    and none for a last one that a kill cut short."""
    with contextlib.suppress(FileNotFoundError), file.open("rb") as stream:
        while (line := stream.readline()) and stream.tell() <= end:
            record = parse(line)
            if is_number(record.get("step")):
                yield record
            elif line.endswith(b"\n"):
                yield {}


def list_checkpoints(checkpoints: Path) -> list[Path]:
    """Return the checkpoints in a folder, whole or damaged, the newest first."""
    found = [path for path in checkpoints.glob("step_*") if re.fullmatch(r"step_\d{8,}", path.name) and path.is_dir()]
    return sorted(found, key=lambda path: (len(path.name), path.name), reverse=True)


def saved_settings(folder: Path) -> dict[str, Any]:
    """Return the settings of the run in an output folder; empty if there are none."""
    try:
        saved = read_yaml((folder / "config.yaml").read_text())
        return parse(json.dumps(saved, default=str))  # which refuses one that contains itself
    except (OSError, TypeError, ValueError, RecursionError, YAMLError):
        return {}


def parent_checkpoint(config: Config) -> Path | None:
    """Return the checkpoint that the run branches off from: by `resume`, or by what its folder says about its start."""
    resume = config.resume if config.resume not in ("auto", "never") else saved_settings(config.folder).get("resume")
    return Path(str(resume)) if resume not in ("auto", "never", None) else None


def changed_settings(config: Config, saved: dict[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Return the settings that make this a different run from the saved one, as (then, now) by name, including
    max_steps and epochs, which say how long it is."""
    now, changed = config.model_dump(mode="json"), {}
    safe = marked(type(config), Change.SAFE)
    for name, _ in fields(type(config)):
        if name in safe:
            continue
        with contextlib.suppress(KeyError, TypeError):  # another version of the code did not have it
            before, after = (reduce(getitem, name.split("."), values) for values in (saved, now))
            if before != after:
                changed[name] = before, after
    return changed


def folder_errors(config: Config, mirrored: list[Path] | None = None) -> Iterator[str]:
    """Yield why the run, or its check, must not write into its folder as it is now, one line each. `mirrored` are the
    checkpoints in its mirror: as long as they are not known, the folder may lack anything."""
    folder = config.folder
    try:
        if any(len(os.fsencode(part)) > 255 for part in folder.parts):
            yield f"output_dir={folder}: has a name of more than 255 bytes; {ELSEWHERE}"
            return
        writes_run = True
        if config.check:  # room: check
            writes_run = False
        if config.checkpoint.mirror and mirrored is None:  # room: mirror
            writes_run = False
        if config.check and config.dry_run:  # room: check
            yield "dry_run: writes nothing, and check writes check.json; choose one of them"
        if writes_run:
            yield from _run_errors(config, mirrored or [])
        yield from _write_errors(folder)
    except OSError as error:
        yield f"output_dir={folder}: cannot look at {error.filename}, {error.strerror}; {ELSEWHERE}"


def _run_errors(config: Config, mirrored: list[Path]) -> Iterator[str]:
    """Yield what is wrong with the run that the folder, or its mirror, holds."""
    folder, saved = config.folder, saved_settings(config.folder)
    held = [name for name in RUN_FILES if _is_held(folder / name)]
    checkpoints = list_checkpoints(folder / "checkpoints") or mirrored
    if mirrored:  # room: mirror
        held.append("checkpoint.mirror")
    elsewhere = f"{ELSEWHERE}, or move that folder away"
    lost = f"output_dir={folder}: its run saved checkpoints, but none are there: restore {folder / 'checkpoints'}"
    lost = f"{lost}; or {elsewhere}"
    holds, holds_run = f"output_dir={folder}: holds", f"a run already ({', '.join(held)})"
    if config.resume not in ("auto", "never"):
        source = Path(config.resume)
        is_branch = Path(str(saved.get("resume"))).resolve() == source.resolve()
        if is_branch and checkpoints:
            return  # it continues from its own
        if is_branch and _had_checkpoints(folder, saved):
            yield lost
        elif not (source / "manifest.json").is_file():
            there = [str(path) for path in (*source.glob("step_*"), *source.glob("checkpoints/step_*"))]
            yield f"resume={source}: not a checkpoint{nearest(str(source), there)}; auto, never, or a folder step_…"
        elif held and not is_branch and source.resolve() not in [path.resolve() for path in checkpoints[:1]]:
            yield f"{holds} a run whose newest checkpoint is not resume={source}; {elsewhere}"
    elif held and config.resume == "never":
        yield f"{holds} {holds_run}; {elsewhere}"
    elif held and not checkpoints:
        if "summary.json" in held or "model" in held or not saved:
            yield f"{holds} {holds_run}, but no checkpoint of it; {elsewhere}"
        elif changed_settings(config, saved).keys() - LENGTH_SETTINGS:
            yield f"{holds} the beginning of a run with other settings; {elsewhere}"
        elif _had_checkpoints(folder, saved):
            yield lost


def _is_held(path: Path) -> bool:
    """Return whether a run has written it. A folder made in advance, or a link to one on another disk, is empty."""
    if path.name == "checkpoints":
        return any(path.glob("*step_*"))
    return any(path.iterdir()) if path.is_dir() else os.path.lexists(path)


def _had_checkpoints(folder: Path, saved: dict[str, Any]) -> bool:
    """Return whether the run in a folder has saved a checkpoint of its own, which its status.json says."""
    with contextlib.suppress(FileNotFoundError):
        newest = parse((folder / "status.json").read_bytes()).get("checkpoint")
        return newest not in (None, saved.get("resume"))
    return False


def _write_errors(folder: Path) -> Iterator[str]:
    """Yield a line for each place that cannot be written to."""
    parents, own = folder.absolute().parents, [folder / name for name in RUN_FILES]
    for path in (*parents, folder, *own, *folder.glob("checkpoints/step_*")):
        if path.is_symlink() and not path.exists():
            target = os.readlink(path)
            yield f"output_dir={folder}: {path} is a broken link to {target}: mount the disk or create the folder"
    parent = next(path for path in (folder, *parents) if os.path.exists(path))
    if not parent.is_dir():
        yield f"output_dir={folder}: {parent} is a file, not a folder; choose another --output_dir"
        return
    for path in (parent, *own):  # some may be another user's
        try:
            if path.is_dir():
                tempfile.TemporaryFile(dir=path).close()
            elif path.exists():
                path.open("a").close()
        except OSError as error:
            where = f"in {path}" if path.is_dir() else path
            yield f"output_dir={folder}: cannot write {where}, {error.strerror}; choose another --output_dir"
