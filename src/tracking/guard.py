"""A guard around what records a run elsewhere: whatever happens to it, the training neither ends nor waits for it."""

import math
import queue
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any

from src.config.errors import cause
from src.tasks.base import Table
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
    """Where the run is recorded, in a few words; known once it has started."""
    closing = ""
    """The line that tells the user, at the end, how to see the run."""

    def start(self) -> None:
        """Begin or continue the run."""

    def log(self, record: Record, tables: dict[str, Table]) -> None:
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
        self.recorder, self._say = recorder, say
        self.failure: str | None = None
        """Why the run is not recorded, or not to its end; None if it is."""
        self._calls: queue.SimpleQueue[Callable[[], object] | None] = queue.SimpleQueue()
        self._busy_since = math.inf
        self._is_started = threading.Event()
        self._thread = threading.Thread(target=self._work, daemon=True)
        self._thread.start()
        self.tell(recorder.start)
        if not self._is_started.wait(START_SECONDS):
            self._fail(f"it has not started within {START_SECONDS:.0f} seconds")

    def tell(self, method: Callable[..., object], *arguments: Any) -> None:
        """Have the thread call one of the recorder's methods."""
        if time.monotonic() - self._busy_since > HANG_SECONDS:
            self._fail(f"it has not answered for {HANG_SECONDS:.0f} seconds")
        if not self.failure:
            self._calls.put(partial(method, *arguments))

    def finish(self, summary: Record | None, crash: str | None) -> None:
        """End the recorder's run, and wait for it."""
        self.tell(self.recorder.finish, summary, crash)
        self._calls.put(None)
        if not self.failure:
            self._thread.join(HANG_SECONDS)
        if self._thread.is_alive():
            self._fail(f"it has not answered for {HANG_SECONDS:.0f} seconds")

    def _work(self) -> None:
        try:
            for call in iter(self._calls.get, None):
                self._busy_since = time.monotonic()
                call()
                self._busy_since = math.inf
                self._is_started.set()
        except Exception as error:  # from the recorder or the file system: no reason not to train
            self._fail(cause(error))
            self._is_started.set()

    def _fail(self, why: str) -> None:
        if self.failure:
            return
        self.failure = why
        threading.Thread(target=self.recorder.abandon, daemon=True).start()
        if self._is_started.is_set():
            self._say(f"WARNING: {self.recorder.title} failed ({why}): the run goes on, recorded in metrics.jsonl")


def describe(run: Run) -> dict[str, Any]:
    """Return the run's settings, how it was launched, and fingerprints of its data."""
    return run.config.model_dump(mode="json") | {"launch": run.launch.as_dict(), "data": run.metadata["data"]}
