"""What a part of the project, such as W&B, is told of a run. src/parts.py lists the parts."""

import os
import uuid
from collections.abc import Callable
from typing import Any

from src.checkpoint.files import write_json
from src.config.errors import cause
from src.config.terminal import say
from src.tasks.base import Tables
from src.training.run import Run

Record = dict[str, Any]
"""What metrics.jsonl or summary.json holds: values by name."""


class Part:
    """A part that a copy may leave out. It is told what happens to the run, on the main process."""

    title = ""
    where = ""
    """What the start-up summary says of it; known once it has started."""
    closing = ""
    """The line that tells the user, at the end, how to see what it made."""
    failure: str | None = None
    """The reason why it does not record the run, or not to its end; None if it does."""

    def __init__(self, run: Run, run_id: str) -> None:
        self._run, self._id = run, run_id

    @property
    def is_on(self) -> bool:
        """Return whether the settings ask for it."""
        return True

    def start(self) -> None:
        """Begin to record the run or, by its id, continue it."""

    def log(self, record: Record, tables: Tables) -> None:
        """Take what an interval or an evaluation gave: numbers, `step` among them, and tables."""

    def end(self, summary: Record | None, crash: str | None) -> None:
        """End the record of the run. Return when all is written and, online, uploaded.

        Args:
            summary: what came out of the run; None: it has not come to its end.
            crash: why; None: it has, or it was stopped and will be continued.
        """


class Parts:
    """The parts that the settings ask for; only on the main process. As a context manager, it tells them that the run
    has crashed, or was stopped."""

    def __init__(self, run: Run, makers: list[Callable[[Run, str], Part]]) -> None:
        """Make them, and tell them that the run begins."""
        self._run, own = run, run.resume.own_state(run.config)
        self.run_id = (own and own.run_id) or os.environ.get("WANDB_RUN_ID") or uuid.uuid4().hex[:8]
        """The id by which a later session continues the run. A sweep's agent sets the variable."""
        parts = [make(run, self.run_id) for make in makers if run.is_main]
        self._parts = [part for part in parts if part.is_on]
        for part in self._parts:
            part.start()
        self._has_ended = False

    @property
    def where(self) -> dict[str, str]:
        """Return where each of them records the run, or why it does not, by its title."""
        return {part.title: f"not recorded: {part.failure}" if part.failure else part.where for part in self._parts}

    def log(self, record: Record, tables: Tables) -> None:
        """Tell them that an interval has ended, or an evaluation was made."""
        for part in self._parts if record else ():
            part.log(record, tables)

    def end(self, summary: Record | None, crash: str | None = None) -> None:
        """Tell them that the run ends. Say how to see what they made, and add to summary.json which of them failed."""
        self._has_ended = True
        for part in self._parts:
            part.end(summary, crash)
            if summary and part.closing and not part.failure:
                say(part.closing)
        failures = {part.title: part.failure for part in self._parts if part.failure}
        if summary and failures:
            write_json(self._run.config.folder / "summary.json", summary | {"tracker_failures": failures})

    def __enter__(self) -> "Parts":
        return self

    def __exit__(self, _kind: object, error: BaseException | None, _traceback: object) -> None:
        if not self._has_ended:
            step = self._run.progress.step
            self.end(None, f"step {step}: {type(error).__name__}: {cause(error)}" if error else None)
