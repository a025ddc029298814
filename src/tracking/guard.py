"""A guard around a part that may hang or raise: whatever happens to it, the training goes on, after a limited wait."""

import contextlib
import io
import math
import threading
import time
from collections.abc import Callable
from multiprocessing.pool import ThreadPool
from typing import Any

from src.config.errors import cause
from src.config.terminal import say
from src.tasks.base import Tables
from src.tracking.part import Part, Record
from src.training.run import Run

START_SECONDS = 240.0
"""Seconds that a part may take to start: W&B gives up on its server after 90."""
HANG_SECONDS = 180.0
"""Seconds that a call may then take. W&B gives up on uploads at the end of a run after 120."""


class Risky(Part):
    """A part that may hang or raise."""

    def abandon(self) -> None:
        """Let go of what hangs or has failed, so that this process can end."""


def guarded(kind: type[Risky]) -> Callable[[Run, str], Part]:
    """Return what makes a part of this kind, with a guard around it."""
    return lambda run, run_id: Guarded(kind(run, run_id))


class Guarded(Part):
    """Calls a part in a thread of its own, one call after the other. After the first failure, drops the calls."""

    def __init__(self, part: Risky) -> None:
        self._part = part
        self.title = part.title
        self._busy_since = math.inf
        self._has_started = False

    @property
    def is_on(self) -> bool:
        return self._part.is_on

    def start(self) -> None:
        self._thread = ThreadPool(1)  # one that hangs does not keep the process from ending
        # trackio prints. Redirect here, not in the part's thread: a hang there would leave standard output redirected.
        with contextlib.redirect_stdout(io.StringIO()):
            self._tell(self._part.start)
            self._wait(START_SECONDS)
        self.where, self._has_started = self._part.where, True

    def log(self, record: Record, tables: Tables) -> None:
        self._tell(self._part.log, record, tables)

    def end(self, summary: Record | None, crash: str | None) -> None:
        self._tell(self._part.end, summary, crash)
        self._wait(HANG_SECONDS)
        self._thread.close()
        self.closing = self._part.closing

    def _tell(self, method: Callable[..., object], *arguments: Any) -> None:
        """Have the thread call one of the part's methods."""
        if time.monotonic() - self._busy_since > HANG_SECONDS:
            self._fail(f"it has not answered for {HANG_SECONDS:.0f} seconds")
        if not self.failure:
            self._last = self._thread.apply_async(self._call, (method, *arguments))

    def _wait(self, seconds: float) -> None:
        if not self.failure:
            self._last.wait(seconds)
            if not self._last.ready():
                self._fail(f"it has not answered for {seconds:.0f} seconds")

    def _call(self, method: Callable[..., object], *arguments: Any) -> None:
        if self.failure:
            return
        self._busy_since = time.monotonic()
        try:
            method(*arguments)
        except Exception as error:  # from the part or the file system: no reason not to train
            self._fail(cause(error))
        self._busy_since = math.inf

    def _fail(self, why: str) -> None:
        if self.failure:
            return
        self.failure = why
        threading.Thread(target=self._part.abandon, daemon=True).start()
        if self._has_started:  # the start-up summary tells what fails by then
            say(f"WARNING: {self.title} failed ({why}): the run goes on, recorded in metrics.jsonl")


def describe(run: Run) -> Record:
    """Return the run's settings, how it was launched, and fingerprints of its data."""
    return run.origin.settings | {"launch": vars(run.launch), "data": run.origin.fingerprints}
