"""Parts: optional code, such as W&B, that follows a run. src/parts.py lists them."""

import contextlib
import os
import uuid
from collections.abc import Callable, Sequence
from typing import Any

from src.config.errors import cause
from src.config.terminal import say
from src.tasks.base import Tables
from src.training.run import Run

Entry = dict[str, Any]
"""A line of metrics.jsonl, or summary.json: values by name."""


class Part:
    """Optional code that follows a run, on the main process."""

    title = ""
    where = ""
    """Where it logs the run, or why it doesn't, for the startup summary; set by `start`."""
    closing = ""
    """The line of the closing block that says how to see the result; empty for none."""

    def __init__(self, run: Run, run_id: str) -> None:
        self._run, self._id, self.folder = run, run_id, run.config.folder

    def is_on(self) -> bool:
        """Return whether the settings enable it."""
        return True

    def start(self) -> None:
        """Start logging the run or, by its id, resume."""

    def log(self, entry: Entry, tables: Tables) -> None:
        """Log the results of an interval or an evaluation: numbers, including `step`, and tables."""

    def end(self, summary: Entry | None, crash: str | None) -> None:
        """Finish logging. Return when everything is written and, online, uploaded.

        Args:
            summary: the results of the run; None if it was stopped or crashed.
            crash: the error; None if the run has finished, or was stopped and can be resumed.
        """


class Parts(contextlib.AbstractContextManager["Parts"]):
    """The parts that the settings enable, on the main process only. As a context manager, it tells them when the run
    crashes or is stopped."""

    def __init__(self, run: Run, kinds: Sequence[Callable[[Run, str], Part]]) -> None:
        """Create and start them."""
        self._run, own = run, run.resume.own_state(run.config)
        if own and os.path.exists(own.folder) and not os.path.samefile(own.folder, run.config.folder):
            run.resume.notes.append(f"trackers get a new run: this one was copied from {own.folder}")
            own = None
        self.run_id = (own and own.run_id) or os.environ.get("WANDB_RUN_ID") or uuid.uuid4().hex[:8]
        """The id under which a resumed run is logged. A sweep's agent sets the variable."""
        parts = [kind(run, self.run_id) for kind in kinds if run.is_main]
        self._parts = [part for part in parts if part.is_on()]
        for part in self._parts:
            part.start()
        self.where = {part.title: part.where for part in self._parts}
        """Where each part logs the run, or why it doesn't, by its title."""

    def log(self, entry: Entry, tables: Tables) -> None:
        """Log the results of an interval or an evaluation."""
        for part in self._parts:
            part.log(entry, tables)

    def end(self, summary: Entry | None, crash: str | None = None) -> None:
        """End the parts, and print their closing lines. Another call does nothing."""
        parts, self._parts = self._parts, []
        for part in parts:
            part.end(summary, crash)
            if part.closing:
                say(part.closing)

    def __exit__(self, _kind: object, error: BaseException | None, _traceback: object) -> None:
        crash = f"step {self._run.progress.step}: {type(error).__name__}: {cause(error)}" if error else None
        self.end(None, crash)
