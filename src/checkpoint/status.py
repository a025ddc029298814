"""status.json: whether a run is unfinished, preempted or done, and how to resume it. Scripts that requeue runs read
it."""

import os
from pathlib import Path
from threading import RLock
from typing import NoReturn

from src.checkpoint.files import Json, write_json
from src.config.config import Config
from src.config.terminal import say
from src.distributed.process import SIGNALS, end_launcher
from src.training.state import ResumePoint

WRITING = RLock()
"""Held while status.json is written, as checkpoints are published by another thread than the loop's."""


def write_unfinished(folder: Path, checkpoint: Path | None) -> None:
    """Write the status that remains if the run is killed. `checkpoint` is its last one; None: there is none yet."""
    write_status(folder, {"status": "unfinished", "checkpoint": checkpoint and str(checkpoint)})


def write_stopped(folder: Path, reason: str, step: int, checkpoint: Path | None, command: str) -> None:
    """Write, and print, that the run was preempted, and the command that resumes it."""
    facts = {"reason": reason, "step": step, "checkpoint": checkpoint and str(checkpoint), "command": command}
    write_status(folder, {"status": "preempted", **facts})
    when = f"after step {step}" if step else "before the first step"
    say(f"stopped {when} by {reason}; to resume: {command}")


def answer_at_start(config: Config, resume: ResumePoint, is_main: bool) -> None:
    """Make a signal end the run at once until the loop begins, as there is nothing to save."""

    def stop() -> NoReturn:
        with WRITING:  # never released: nothing else may be written
            write_stopped(config.folder, str(SIGNALS.name), resume.progress.step, resume.checkpoint, resume.command)
            end_launcher()
            os._exit(0)  # whatever the main thread is doing

    if not config.saves:
        SIGNALS.release()
        if SIGNALS.name:  # one that came during the imports
            SIGNALS.die()
    elif is_main:
        SIGNALS.answer_by(stop)


def write_status(folder: Path, status: Json) -> None:
    """Write this status."""
    with WRITING:
        write_json(folder / "status.json", status)
