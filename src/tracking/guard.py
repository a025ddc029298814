"""A guard around what records a run elsewhere: whatever happens to it, the training neither ends nor waits for it."""

import math
import queue
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from src.config.errors import cause
from src.tasks.base import Table
from src.training.run import Run

START_SECONDS = 240.0
"""Seconds that a recorder may take to start: W&B gives up on its server after 90."""
HANG_SECONDS = 60.0
"""Seconds that a call may then take. The recorder only has to accept a record, on this machine; longer is hung."""
FINISH_SECONDS = 120.0
"""Seconds that the end of a run waits for pending uploads."""
PROBE_BYTES = 2**16
"""Written to make sure that there is room: on a full disk W&B and trackio silently lose records."""

Record = dict[str, Any]


class Recorder:
    """What records a run besides metrics.jsonl. Each method may raise or hang: `Guarded` calls them in a thread."""

    title = ""
    where = ""
    """Where the run is recorded, in a few words; known once it has started."""
    id: str | None = None
    """Name by which a later session continues the run; None: it can't."""

    def start(self) -> None:
        """Begin or continue the run."""

    def log(self, record: Record, tables: dict[str, Table]) -> None:
        """Record numbers, `step` among them, and tables."""

    def summarize(self, summary: Record) -> None:
        """Record what came out of the run."""

    def alert(self, crash: str) -> None:
        """Notify those who watch the run that it crashed."""

    def mark_stopped(self) -> None:
        """Record that the run was stopped and will be continued."""

    def finish(self, exit_code: int) -> None:
        """End the run; return when all is written and, online, uploaded."""

    def abandon(self) -> None:
        """Let go of what hangs or has failed, so that this process can end."""

    def closing_line(self) -> str | None:
        """Return the line that tells the user how to see the run, if there is one."""
        return None


class Guarded:
    """Calls a recorder in a thread of its own, one call after the other. After the first failure, drops the calls."""

    def __init__(self, recorder: Recorder, say: Callable[[str], None], folder: Path) -> None:
        """Start the recorder and wait for it.

        Args:
            say: tells the user, once, that it failed later on; called from the thread too.
            folder: where it writes; it has to have room.
        """
        self.recorder = recorder
        self.failure: str | None = None
        """Why the run is not recorded, or not to its end; None if it is."""
        self._say, self._folder = say, folder
        self._calls: queue.SimpleQueue[Callable[[], object] | None] = queue.SimpleQueue()
        self._busy_since = math.inf
        self._is_started = threading.Event()
        self._thread = threading.Thread(target=self._work, daemon=True)
        self._thread.start()
        self._calls.put(recorder.start)
        if not self._is_started.wait(START_SECONDS):
            self._fail(TimeoutError(f"it has not started within {START_SECONDS:.0f} seconds"))

    @property
    def where(self) -> str:
        """Return where the run is recorded, or why it is not."""
        return f"not recorded: {self.failure}" if self.failure else self.recorder.where

    def tell(self, method: Callable[..., object], *arguments: Any) -> None:
        """Have the thread call one of the recorder's methods."""
        if time.monotonic() - self._busy_since > HANG_SECONDS:
            self._fail(TimeoutError(f"it has not answered for {HANG_SECONDS:.0f} seconds"))
        if self.failure is None:
            self._calls.put(lambda: method(*arguments))

    def finish(self, exit_code: int) -> None:
        """End the recorder's run, and wait for it."""
        self.tell(self.recorder.finish, exit_code)
        self._calls.put(None)
        seconds = HANG_SECONDS if self.failure else FINISH_SECONDS + HANG_SECONDS
        self._thread.join(seconds)
        if self._thread.is_alive():
            self._fail(TimeoutError(f"it has not answered for {seconds:.0f} seconds"))

    def closing_line(self) -> str | None:
        """Return the recorder's closing line; None if it failed."""
        return None if self.failure else self.recorder.closing_line()

    def _work(self) -> None:
        for call in iter(self._calls.get, None):
            self._busy_since = time.monotonic()
            try:
                require_room(self._folder)
                call()
            except Exception as error:  # from the recorder or the file system: no reason not to train
                self._fail(error)
            self._busy_since = math.inf
            self._is_started.set()
            if self.failure:
                break

    def _fail(self, error: Exception) -> None:
        if self.failure is not None:
            return
        self.failure = cause(error)
        threading.Thread(target=self.recorder.abandon, daemon=True).start()
        if self._is_started.is_set():
            title = self.recorder.title
            self._say(f"WARNING: {title} failed ({self.failure}): the run goes on, recorded in metrics.jsonl")


def require_room(folder: Path) -> None:
    """Raise an OSError if nothing more can be written there, or where it will be made."""
    with tempfile.TemporaryFile(dir=folder if folder.exists() else folder.parent) as file:
        file.write(bytes(PROBE_BYTES))


def describe(run: Run) -> dict[str, Any]:
    """Return the run's settings, and what it started from: its data, and the run that it branched off from."""
    settings = run.config.model_dump(mode="json")
    settings |= {"launch": run.launch.as_dict(), "data": run.metadata["data"]}
    state = run.resume.state
    if state and not run.resume.is_own(run.config):
        checkpoint = str(run.resume.checkpoint)
        settings["parent"] = {"id": state.wandb_id, "step": state.progress.step, "checkpoint": checkpoint}
    return settings
