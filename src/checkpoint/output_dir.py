"""Refuse and lock output folders: a run must not write into another run's folder, or one that is not writable."""

import atexit
import contextlib
import fcntl
import os
import stat
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from src.checkpoint.files import list_checkpoints, planted, read_json, saved_settings
from src.config.config import LENGTH_SETTINGS, Config, changed_settings
from src.config.errors import UserError, as_user_error
from src.config.terminal import say
from src.distributed.process import SIGNALS

RUN_FILES = "config.yaml", "metrics.jsonl", "summary.json", "model", "checkpoints", "wandb"
"""Files of a run in its output folder, except status.json, which even a run preempted at its start leaves."""
LOCK = ".lock"
ANOTHER_PLACE = "choose another --run_name or --output_dir"
PATIENCE_SECONDS = 40
"""A little longer than a launcher gives its processes to end."""


def folder_errors(config: Config, found: list[Path] | None = None) -> Iterator[str]:
    """Yield an error line for each reason why the run must not write into its output folder. `found` are the
    checkpoints there and in its mirror; None: not known yet, so the folder may lack anything that a mirror has."""
    folder = config.folder
    try:
        # a copy of the project may have no mirrors
        is_known = found is not None or not getattr(config.checkpoint, "mirror", None)
        if config.mode != "check" and is_known:
            yield from _run_errors(config, found or list_checkpoints(folder / "checkpoints"))
        yield from _write_errors(folder)
    except OSError as error:
        yield f"output_dir={folder}: cannot access {error.filename}, {error.strerror}; {ANOTHER_PLACE}"


def _run_errors(config: Config, checkpoints: list[Path]) -> Iterator[str]:
    """Yield what is wrong with the run in the folder, or in its mirror, that has these checkpoints."""
    folder, saved = config.folder, saved_settings(config.folder)
    held = [name for name in RUN_FILES if _is_held(folder / name)]
    if checkpoints and not held:
        held.append("checkpoint.mirror")
    elsewhere = f"{ANOTHER_PLACE}, or move that folder away"
    # status.json names the last checkpoint that the run has saved or, before the first, the one that it branches off
    last = read_json(folder / "status.json").get("checkpoint") if held and not checkpoints else None
    has_lost_own = last not in (None, saved.get("resume"))
    lost = f"output_dir={folder}: its checkpoints are missing: restore {folder / 'checkpoints'}; or {elsewhere}"
    holds, a_run = f"output_dir={folder}: already holds", f"a run ({', '.join(held)})"
    if config.resume not in ("auto", "never"):
        source = Path(config.resume)
        is_branch = Path(str(saved.get("resume"))).resolve() == source.resolve()
        if is_branch and checkpoints:
            return  # it resumes from its own
        if is_branch and has_lost_own:
            yield lost
        elif not (source / "manifest.json").is_file():
            yield f"resume={source}: not a checkpoint; auto, never, or a folder step_…"
        elif held and not is_branch and source.resolve() not in [path.resolve() for path in checkpoints[:1]]:
            yield f"{holds} a run whose newest checkpoint is not resume={source}; {elsewhere}, or set --resume=auto"
    elif held and config.resume == "never":
        yield f"{holds} {a_run}; {elsewhere}"
    elif held and not checkpoints:
        is_another = changed_settings(config, saved).keys() - LENGTH_SETTINGS if saved else True
        if is_another or "summary.json" in held or "model" in held:
            yield f"{holds} {a_run}, but no checkpoint of it; {elsewhere}"
        elif has_lost_own:
            yield lost


def _is_held(path: Path) -> bool:
    """Return whether a run has written this path, which may be an empty folder made in advance, or a link to one."""
    if path.name == "checkpoints":
        return any(path.glob("*step_*"))
    return any(path.iterdir()) if path.is_dir() else os.path.lexists(path)


def _write_errors(folder: Path) -> Iterator[str]:
    """Yield an error line for each path that is not writable."""
    parents, own = folder.absolute().parents, [folder / name for name in (*RUN_FILES, "profile", "tensorboard")]
    for path in filter(Path.is_symlink, (*parents, folder, *own, *folder.glob("checkpoints/step_*"))):
        path.stat()  # an error if the link is broken, as where a disk is not mounted
        if path not in parents:  # which the user has named
            yield from (f"output_dir={folder}: {line}" for line in planted(path))
    parent = next(filter(os.path.exists, (folder, *parents)))
    for path in (parent, *own):  # some may belong to another user
        try:
            if path.is_dir() or path == parent:
                tempfile.TemporaryFile(dir=path).close()
            elif path.exists():  # a link would lead elsewhere, and a pipe would make the run wait
                os.close(os.open(path, os.O_WRONLY | os.O_NOFOLLOW | os.O_NONBLOCK))
        except OSError as error:
            yield f"output_dir={folder}: cannot write to {path}, {error.strerror}; choose another --output_dir"


def lock_run(folder: Path) -> None:
    """Lock an output folder and its checkpoints, if those are on another disk: two runs must not share them either."""
    lock(folder)
    checkpoints = folder / "checkpoints"
    if checkpoints.is_symlink():
        lock(checkpoints)


def lock(folder: Path) -> None:
    """Lock a folder until this process ends. Raise a UserError if another process on this machine still holds the lock
    after PATIENCE_SECONDS, or the file that is locked is a link or another user's."""
    if not os.path.exists(folder):
        atexit.register(_delete_if_empty, folder)
    file = folder / LOCK
    for second in range(PATIENCE_SECONDS):
        hint = f"delete {LOCK} there if a run of another user has left it"
        with as_user_error(f"output_dir={folder}: cannot be locked, {hint}: ", OSError):
            folder.mkdir(parents=True, exist_ok=True)
            is_for_group = folder.stat().st_mode & stat.S_IWGRP  # a folder that its group writes into
            # not the folder itself, which whoever may read it could lock
            descriptor = os.open(file, os.O_CREAT | os.O_NOFOLLOW | os.O_RDWR, 0o660 if is_for_group else 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if SIGNALS.name:  # without a status.json, which belongs to the other process
                SIGNALS.die()
            if second == 0:
                say(f"{folder}: another process is still writing this run; waiting for it to end")
            os.close(descriptor)
            time.sleep(1)
            continue
        except OSError:  # a file system without locks
            pass
        if file.exists() and os.path.samestat(os.fstat(descriptor), file.stat()):  # else the one before has deleted it
            atexit.register(file.unlink, missing_ok=True)
            return
    raise UserError(f"output_dir={folder}: another process is writing this run; stop it, or choose another --run_name")


def _delete_if_empty(folder: Path) -> None:
    """Delete the empty folder that a refused run would leave behind."""
    with contextlib.suppress(OSError):
        folder.rmdir()
