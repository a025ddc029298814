"""Refuse and lock output folders: a run must not write into another run's folder, or one that is not writable."""

import fcntl
import os
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from src.checkpoint.files import MANIFEST, list_checkpoints, planted, read_json, saved_settings
from src.config.config import LENGTH_SETTINGS, Config, changed_settings
from src.config.errors import UserError, as_user_error
from src.config.terminal import say
from src.distributed.process import SIGNALS

RUN_FILES = ("config.yaml", "metrics.jsonl", "summary.json", "model", "checkpoints", "wandb")
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
    held = [name for name in RUN_FILES if _is_held(folder / name)] or ["checkpoint.mirror"] * bool(checkpoints)
    elsewhere = f"{ANOTHER_PLACE}, or move that folder away"
    holds, a_run = f"output_dir={folder}: already holds", f"a run ({', '.join(held)})"
    is_branch, source = config.resume not in ("auto", "never"), Path(config.resume).resolve()
    is_own = not is_branch or Path(str(saved.get("resume"))).resolve() == source
    if is_branch and not (is_own and checkpoints) and not (source / MANIFEST).is_file():
        yield f"resume={config.resume}: not a checkpoint; auto, never, or a folder step_…"
    elif held and not is_own and source not in [path.resolve() for path in checkpoints[:1]]:
        yield f"{holds} a run whose newest checkpoint is not resume={config.resume}; {elsewhere}, or set --resume=auto"
    elif held and config.resume == "never":
        yield f"{holds} {a_run}; {elsewhere}"
    elif held and is_own and not checkpoints:
        is_another = changed_settings(config, saved).keys() - LENGTH_SETTINGS if saved else True
        if is_another or "summary.json" in held or "model" in held:
            yield f"{holds} {a_run}, but no checkpoint of it; {elsewhere}"
        # according to its status.json, which names the checkpoint that it branched off from until it has its own
        elif read_json(folder / "status.json").get("checkpoint") not in (None, saved.get("resume")):
            lost = f"its checkpoints are missing: restore {folder / 'checkpoints'}"
            yield f"output_dir={folder}: {lost}; or {elsewhere}"


def _is_held(path: Path) -> bool:
    """Return whether a run has written this path, which may be an empty folder made in advance, or a link to one."""
    if path.name == "checkpoints":
        return any(path.glob("*step_*"))
    return any(path.iterdir()) if path.is_dir() else os.path.lexists(path)


def _write_errors(folder: Path) -> Iterator[str]:
    """Yield an error line for each path that is not writable."""
    own = [folder / name for name in (*RUN_FILES, "profile", "tensorboard")]
    for path in (folder, *own, *folder.glob("checkpoints/step_*")):
        yield from (f"output_dir={folder}: {line}" for line in planted(path))
    parent = next(path for path in (folder, *folder.absolute().parents) if os.path.lexists(path))
    for path in filter(os.path.lexists, (parent, *own)):  # some may belong to another user
        try:
            # an error if it is a link to a disk that is not mounted
            if path.resolve(strict=True).is_dir() or path == parent:
                tempfile.TemporaryFile(dir=path).close()
            else:  # a link would lead elsewhere, and a pipe would make the run wait
                os.close(os.open(path, os.O_WRONLY | os.O_NOFOLLOW | os.O_NONBLOCK))
        except OSError as error:
            yield f"output_dir={folder}: cannot write to {path}, {error.strerror}; choose another --output_dir"


def lock(folder: Path) -> None:
    """Lock a folder until this process ends. Raise a UserError if another process on this machine still holds the lock
    after PATIENCE_SECONDS, or the file that is locked is a link or another user's."""
    hint = f"delete {LOCK} there if a run of another user has left it"
    with as_user_error(f"output_dir={folder}: cannot be locked, {hint}: ", OSError):
        folder.mkdir(parents=True, exist_ok=True)
        # not the folder itself, which whoever may read it could lock
        descriptor = os.open(folder / LOCK, os.O_CREAT | os.O_NOFOLLOW | os.O_RDWR, 0o600)
    for second in range(PATIENCE_SECONDS):
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if SIGNALS.name:  # without a status.json, which belongs to the other process
                SIGNALS.die()
            if second == 0:
                say(f"{folder}: another process is still writing this run; waiting for it to end")
            time.sleep(1)
        except OSError:  # a file system without locks
            return
        else:
            return
    raise UserError(f"output_dir={folder}: another process is writing this run; stop it, or choose another --run_name")
