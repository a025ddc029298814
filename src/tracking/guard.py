"""A guard around what records a run elsewhere: whatever happens to it, the training neither ends nor waits for it."""

import math
import threading
import time
from collections.abc import Callable
from multiprocessing.pool import ThreadPool
from typing import Any

from src.config.errors import cause
from src.tasks.base import Tables
from src.training.run import Run

START_SECONDS = 240.0
"""Seconds that a recorder may take to start: W&B gives up on its server after 90."""
HANG_SECONDS = 180.0
"""Seconds that a call may then take. W&B gives up on uploads at the end of a run after 120."""

Record = dict[str, Any]


class Recorder:
    """What records a run besides metrics.jsonl. Each method may raise or hang: `Guarded` calls them in a thread."""

    title = ""
    where = ""
    """The place where the run is recorded, in a few words; known once it has started."""
    closing = ""
    """The line that tells the user, at the end, how to see the run."""

    def start(self) -> None:
        """Begin or continue the run."""

    def log(self, record: Record, tables: Tables) -> None:
        """Record numbers, `step` among them, and tables."""

    def finish(self, summary: Record | None, crash: str | None) -> None:
        """End the run; return when all is written and, online, uploaded.

        Args:
            summary: what came out of the run; None: it has not come to its end.
            crash: why; None: it has, or it was told to stop and will be continued.
        """

    def abandon(self) -> None:
        """Let go of what hangs or has failed, so that this process can end."""


class Guarded:
    """Calls a recorder in a thread of its own, one call after the other. After the first failure, drops the calls."""

    def __init__(self, recorder: Recorder, say: Callable[[str], None]) -> None:
        """Start the recorder and wait for it. `say` tells the user, once, that it failed later on."""
        self.recorder = recorder
        self.failure: str | None = None
        """The reason why the run is not recorded, or not to its end; None if it is."""
        self._thread = ThreadPool(1)  # one that hangs does not keep the process from ending
        self._busy_since = math.inf
        self._say: Callable[[str], None] = lambda _: None  # the start-up summary tells what fails by then
        self.tell(recorder.start)
        self._wait(START_SECONDS)
        self._say = say

    def tell(self, method: Callable[..., object], *arguments: Any) -> None:
        """Have the thread call one of the recorder's methods."""
        if time.monotonic() - self._busy_since > HANG_SECONDS:
            self._fail(f"it has not answered for {HANG_SECONDS:.0f} seconds")
        if not self.failure:
            self._last = self._thread.apply_async(self._call, (method, *arguments))

    def finish(self, summary: Record | None, crash: str | None) -> None:
        """End the recorder's run, and wait for it."""
        self.tell(self.recorder.finish, summary, crash)
        self._wait(HANG_SECONDS)
        self._thread.close()

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
        except Exception as error:  # from the recorder or the file system: no reason not to train
            self._fail(cause(error))
        self._busy_since = math.inf

    def _fail(self, why: str) -> None:
        if self.failure:
            return
        self.failure = why
        threading.Thread(target=self.recorder.abandon, daemon=True).start()
        self._say(f"WARNING: {self.recorder.title} failed ({why}): the run goes on, recorded in metrics.jsonl")


def describe(run: Run) -> dict[str, Any]:
    """Return the run's settings, how it was launched, and fingerprints of its data."""
    return run.config.model_dump(mode="json") | {"launch": vars(run.launch), "data": run.metadata["data"]}
