"""Guard a part that may hang or raise: whatever happens to it, training continues after a limited wait."""

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
from src.tracking.part import Entry, Part
from src.training.run import Run

HANG_SECONDS = 240.0
"""Seconds that a call may take: W&B gives up on its server after 90, and on the last uploads after 120."""


def guarded(kind: type[Part]) -> Callable[[Run, str], Part]:
    """Return a function that creates a part of this kind, guarded."""
    return lambda run, run_id: Guarded(kind(run, run_id))


class Guarded(Part):
    """Calls a part in its own thread, one call at a time. Drops all calls after the first failure."""

    def __init__(self, part: Part) -> None:
        self._part = part
        self.title = part.title
        self._busy_since = math.inf

    @property
    def is_on(self) -> bool:
        return self._part.is_on

    def start(self) -> None:
        self._thread = ThreadPool(1)  # a hanging thread of it does not keep the process alive
        # trackio prints. Redirect in this thread: a hang in the part's would leave standard output redirected.
        with contextlib.redirect_stdout(io.StringIO()):
            self._tell(HANG_SECONDS, self._part.start)
        self.where = self._part.where

    def log(self, *results: Any) -> None:
        self._tell(0, self._part.log, *results)

    def end(self, *how: Any) -> None:
        self._tell(HANG_SECONDS, self._part.end, *how)
        self._thread.close()
        self.closing = self._part.closing

    def _tell(self, patience: float, method: Callable[..., object], *arguments: Any) -> None:
        """Have the thread call a method of the part, and wait for that at most `patience` seconds."""
        if self.failure:
            return
        call = self._thread.apply_async(self._call, (method, *arguments))
        call.wait(patience)
        is_late = patience and not call.ready()
        if is_late or time.monotonic() - self._busy_since > HANG_SECONDS:
            self._fail(f"no answer for {HANG_SECONDS:.0f} seconds")

    def _call(self, method: Callable[..., object], *arguments: Any) -> None:
        if self.failure:
            return
        self._busy_since = time.monotonic()
        try:
            method(*arguments)
        except Exception as error:  # whatever it is, training can continue
            self._fail(cause(error))
        self._busy_since = math.inf

    def _fail(self, why: str) -> None:
        if self.failure:
            return
        self.failure = why
        threading.Thread(target=self._part.abandon, daemon=True).start()
        if self.where:  # the startup summary shows earlier failures
            say(f"WARNING: {self.title} failed ({why}); training continues, logged in metrics.jsonl")


def tracked_config(run: Run) -> Entry:
    """Return the run's settings, how it was launched, and the fingerprints of its data."""
    return run.origin.settings | {"launch": vars(run.launch), "data": run.origin.fingerprints}
