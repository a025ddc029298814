"""Parts: optional code, such as W&B, that follows a run. src/parts.py lists them."""

import contextlib
import io
import os
import uuid
from queue import Queue
from threading import Event, Thread
from typing import Any

from src.checkpoint.files import write_json
from src.config.errors import cause
from src.config.terminal import say
from src.tasks.base import Tables
from src.training.run import Run

HANG_SECONDS = 240.0
"""Seconds that a tracker may take to start or to end: W&B gives up on its server after 90, and on the last uploads
after 120."""
MAX_WAITING = 1000
"""Most entries, of a few kB each, that wait for a tracker: those of some seconds if a step takes 0.3 ms."""
Entry = dict[str, Any]
"""A line of metrics.jsonl, or summary.json: values by name."""


class Part:
    """Optional code that follows a run, on the main process."""

    tracker = ""
    """Its name in the setting `trackers`, if it is a tracker: it is guarded then. Empty: it is always on."""
    title = ""
    where = ""
    """Where it logs the run, for the startup summary; set by `start`."""
    closing = ""
    """The line of the closing block that says how to see the result; empty for none."""
    failure: str | None = None
    """Why it stopped logging the run; None if it didn't."""

    def __init__(self, run: Run, run_id: str) -> None:
        self._run, self._id = run, run_id

    def is_on(self) -> bool:
        """Return whether the settings enable it."""
        return not self.tracker or self.tracker in self._run.config.trackers

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

    def abandon(self) -> None:
        """Drop a tracker after it has hung or failed, so that this process can exit."""

    def tracked_config(self) -> Entry:
        """Return the run's settings, how it was launched, and the fingerprints of its data."""
        origin = self._run.origin
        return origin.settings | {"launch": vars(self._run.launch), "data": origin.fingerprints}


class Guarded(Part):
    """Calls a tracker in a thread, so that no step waits for it. Abandons it, and says so once, if it raises, if it
    does not start or end in time, or if too many entries wait for it: training continues."""

    def __init__(self, part: Part) -> None:
        self._part, self.title = part, part.title
        self._entries: Queue[Any] = Queue(MAX_WAITING)
        self._thread = Thread(target=self._follow, daemon=True)  # a daemon that hangs does not keep the process alive
        self._has_started = Event()

    def start(self) -> None:
        self._thread.start()
        # trackio prints. Redirect in this thread: a hang in the part's would leave standard output redirected.
        with contextlib.redirect_stdout(io.StringIO()):
            self._require(self._has_started.wait(HANG_SECONDS))
        self.where = self._part.where

    def log(self, *results: Any) -> None:
        if self._entries.full():
            self._abandon(f"{MAX_WAITING:,} entries wait for it")
        elif not self.failure:
            self._entries.put(results)

    def end(self, *how: Any) -> None:
        self._how = how
        self.log()  # nothing, which ends the thread
        if not self.failure:
            self._thread.join(HANG_SECONDS)
            self._require(not self._thread.is_alive())
        self.closing = self._part.closing

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


class Parts(contextlib.AbstractContextManager["Parts"]):
    """The parts that the settings enable, on the main process only. As a context manager, it tells them when the run
    crashes or is stopped."""

    def __init__(self, run: Run, kinds: list[type[Part]]) -> None:
        """Create and start them."""
        self._run, own = run, run.resume.own_state(run.config)
        if own and os.path.exists(own.folder) and not os.path.samefile(own.folder, run.config.folder):
            run.resume.notes.append(f"trackers get a new run: this one was copied from {own.folder}")
            own = None
        self.run_id = (own and own.run_id) or os.environ.get("WANDB_RUN_ID") or uuid.uuid4().hex[:8]
        """The id under which a resumed run is logged. A sweep's agent sets the variable."""
        parts = [kind(run, self.run_id) for kind in kinds if run.is_main]
        self._parts = [Guarded(part) if part.tracker else part for part in parts if part.is_on()]
        for part in self._parts:
            part.start()
        self.where = {p.title: f"not logged: {p.failure}" if p.failure else p.where for p in self._parts}
        """Where each part logs the run, or why it doesn't, by its title."""

    def log(self, entry: Entry, tables: Tables) -> None:
        """Log the results of an interval or an evaluation."""
        for part in self._parts:
            part.log(entry, tables)

    def end(self, summary: Entry | None, crash: str | None = None) -> None:
        """End the parts, print their closing lines, and add those that failed to summary.json. Another call does
        nothing."""
        parts, self._parts = self._parts, []
        for part in parts:
            part.end(summary, crash)
            if part.closing and not part.failure:
                say(part.closing)
        failures = {part.title: part.failure for part in parts if part.failure}
        if summary and failures:
            with contextlib.suppress(OSError):  # they have been told, and the run is done
                write_json(self._run.config.folder / "summary.json", summary | {"tracker_failures": failures})

    def __exit__(self, _kind: object, error: BaseException | None, _traceback: object) -> None:
        step = self._run.progress.step
        self.end(None, f"step {step}: {type(error).__name__}: {cause(error)}" if error else None)
