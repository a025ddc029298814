"""Trackers: parts that log a run elsewhere, which may hang or fail without harm to it."""

import contextlib
import io
from collections.abc import Callable
from queue import Queue
from threading import Event, Thread
from typing import Any

from src.checkpoint.files import write_json
from src.config.errors import cause
from src.config.terminal import say
from src.tracking.part import Entry, Part
from src.training.run import Run

HANG_SECONDS = 240.0
"""Seconds that a tracker may take to start or to end: W&B gives up on its server after 90, and on the last uploads
after 120."""
MAX_WAITING = 1000
"""Most entries, of a few kB each, that wait for a tracker: those of some seconds if a step takes 0.3 ms."""


class TrackerPart(Part):
    """Logs a run to a tracker. src/parts.py lists it as `guarded` returns it."""

    tracker = ""
    """Its name in the setting `trackers`."""

    def is_on(self) -> bool:
        return self.tracker in self._run.config.trackers

    def abandon(self) -> None:
        """Drop the tracker after it has hung or failed, so that this process can exit."""

    def tracked_config(self) -> Entry:
        """Return the run's settings, how it was launched, and the fingerprints of its data."""
        origin = self._run.origin
        return origin.settings | {"launch": vars(self._run.launch), "data": origin.fingerprints}


def guarded(kind: type[TrackerPart]) -> Callable[[Run, str], Part]:
    """Return what makes parts of this kind, each called in a thread of its own."""
    return lambda run, run_id: Guarded(kind(run, run_id))


class Guarded(Part):
    """Calls a tracker in a thread, so that no step waits for it. Abandons it, and says so once, if it raises, if it
    does not start or end in time, or if too many entries wait for it: training continues."""

    def __init__(self, part: TrackerPart) -> None:
        self._part, self.title = part, part.title
        self._entries: Queue[Any] = Queue(MAX_WAITING)
        self._thread = Thread(target=self._follow, daemon=True)  # a daemon that hangs does not keep the process alive
        self._has_started = Event()
        self.failure: str | None = None
        """Why the run is no longer logged; None if it is."""

    def is_on(self) -> bool:
        return self._part.is_on()

    def start(self) -> None:
        self._thread.start()
        # trackio prints. Redirect in this thread: a hang in the part's would leave standard output redirected.
        with contextlib.redirect_stdout(io.StringIO()):
            self._require(self._has_started.wait(HANG_SECONDS))
        self.where = f"not logged: {self.failure}" if self.failure else self._part.where

    def log(self, *results: Any) -> None:
        if self._entries.full():
            self._abandon(f"{MAX_WAITING:,} entries wait for it")
        elif not self.failure:
            self._entries.put(results)

    def end(self, summary: Entry | None, crash: str | None) -> None:
        self._how = summary, crash
        self.log()  # nothing, which ends the thread
        if not self.failure:
            self._thread.join(HANG_SECONDS)
            self._require(not self._thread.is_alive())
        if not self.failure:
            self.closing = self._part.closing
        elif summary:
            summary.setdefault("tracker_failures", {})[self.title] = self.failure
            with contextlib.suppress(OSError):  # it has been told, and the run is done
                write_json(self._part.folder / "summary.json", summary)

    def _follow(self) -> None:
        """Start the part, log the entries as they come, and end it."""
        try:
            self._part.start()
            self._has_started.set()
            while results := self._entries.get():
                self._part.log(*results)
            self._part.end(*self._how)
        except Exception as error:  # whatever it is, training can continue
            self._abandon(cause(error))

    def _require(self, is_done: bool) -> None:
        if not is_done:
            self._abandon(f"no answer for {HANG_SECONDS:.0f} seconds")

    def _abandon(self, why: str) -> None:
        if not self.failure:
            self.failure = why
            Thread(target=self._part.abandon, daemon=True).start()
            if self.where:  # the startup summary shows earlier failures
                say(f"WARNING: {self.title} failed ({why}); training continues and is logged to metrics.jsonl")
            self._has_started.set()
