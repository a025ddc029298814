"""What a part of the project, such as W&B, is told of a run; and a guard around it: whatever happens to a part, the
training neither ends nor waits for it. src/parts.py lists the parts."""

import contextlib
import io
import math
import os
import threading
import time
import uuid
from collections.abc import Callable
from multiprocessing.pool import ThreadPool
from typing import Any

from src.checkpoint.format import write_json
from src.config.config import Config
from src.config.errors import cause
from src.config.terminal import say
from src.tasks.base import Tables
from src.training.run import Run

START_SECONDS = 240.0
"""Seconds that a part may take to start: W&B gives up on its server after 90."""
HANG_SECONDS = 180.0
"""Seconds that a call may then take. W&B gives up on uploads at the end of a run after 120."""

Record = dict[str, Any]


class Part:
    """A part that a copy may leave out. It is told what happens to the run, on the main process. Each method may raise
    or hang: `Guarded` calls them in a thread."""

    title = ""
    where = ""
    """What the start-up summary says of it; known once it has started."""
    closing = ""
    """The line that tells the user, at the end, how to see what it made."""

    def __init__(self, run: Run, run_id: str) -> None:
        self._run, self._id = run, run_id

    @classmethod
    def is_on(cls, config: Config) -> bool:
        """Return whether the settings ask for it."""
        return True

    def start(self) -> None:
        """The run begins or, by its id, is continued."""

    def log(self, record: Record, tables: Tables) -> None:
        """An interval has ended, or an evaluation was made: take numbers, `step` among them, and tables."""

    def end(self, summary: Record | None, crash: str | None) -> None:
        """The run ends: return when all is written and, online, uploaded.

        Args:
            summary: what came out of the run; None: it has not come to its end.
            crash: why; None: it has, or it was stopped and will be continued.
        """

    def abandon(self) -> None:
        """Let go of what hangs or has failed, so that this process can end."""


class Guarded:
    """Calls a part in a thread of its own, one call after the other. After the first failure, drops the calls."""

    def __init__(self, part: Part, say: Callable[[str], None] = say) -> None:
        """Start the part and wait for it. `say` tells the user, once, that it failed later on."""
        self.part = part
        self.failure: str | None = None
        """The reason why the run is not recorded, or not to its end; None if it is."""
        self._thread = ThreadPool(1)  # one that hangs does not keep the process from ending
        self._busy_since = math.inf
        self._say: Callable[[str], None] = lambda _: None  # the start-up summary tells what fails by then
        self.tell(part.start)
        self._wait(START_SECONDS)
        self._say = say

    def tell(self, method: Callable[..., object], *arguments: Any) -> None:
        """Have the thread call one of the part's methods."""
        if time.monotonic() - self._busy_since > HANG_SECONDS:
            self._fail(f"it has not answered for {HANG_SECONDS:.0f} seconds")
        if not self.failure:
            self._last = self._thread.apply_async(self._call, (method, *arguments))

    def end(self, summary: Record | None, crash: str | None) -> None:
        """Tell it of the end, and wait for it."""
        self.tell(self.part.end, summary, crash)
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
        except Exception as error:  # from the part or the file system: no reason not to train
            self._fail(cause(error))
        self._busy_since = math.inf

    def _fail(self, why: str) -> None:
        if self.failure:
            return
        self.failure = why
        threading.Thread(target=self.part.abandon, daemon=True).start()
        self._say(f"WARNING: {self.part.title} failed ({why}): the run goes on, recorded in metrics.jsonl")


class Parts:
    """The parts that the settings ask for; only on the main process. As a context manager, it tells them that the run
    has crashed, or was stopped."""

    def __init__(self, run: Run, kinds: list[type[Part]]) -> None:
        """Start them."""
        self._run, resume = run, run.resume
        own = resume.state.run_id if resume.state and resume.is_own(run.config) else None
        self.run_id = own or os.environ.get("WANDB_RUN_ID") or uuid.uuid4().hex[:8]
        """The id by which a later session continues the run. A sweep's agent sets the variable."""
        wanted = [kind(run, self.run_id) for kind in kinds if run.is_main and kind.is_on(run.config)]
        # trackio prints; this thread silences it, as the part's own may hang
        with contextlib.redirect_stdout(io.StringIO()):
            self._all = [*map(Guarded, wanted)]
        self._has_ended = False

    @property
    def where(self) -> dict[str, str]:
        """Return where each of them records the run, or why it does not, by its title."""
        return {of.part.title: f"not recorded: {of.failure}" if of.failure else of.part.where for of in self._all}

    def log(self, record: Record, tables: Tables) -> None:
        """Tell them that an interval has ended, or an evaluation was made."""
        for of in self._all if record else ():
            of.tell(of.part.log, record, tables)

    def end(self, summary: Record | None, crash: str | None = None) -> None:
        """Tell them that the run ends. Say how to see what they made, and add to summary.json which of them failed."""
        self._has_ended = True
        for of in self._all:
            of.end(summary, crash)
            if summary and of.part.closing and not of.failure:
                say(of.part.closing)
        failures = {of.part.title: of.failure for of in self._all if of.failure}
        if summary and failures:
            write_json(self._run.config.folder / "summary.json", summary | {"tracker_failures": failures})

    def __enter__(self) -> "Parts":
        return self

    def __exit__(self, _kind: object, error: BaseException | None, _traceback: object) -> None:
        if not self._has_ended:
            step = self._run.progress.step
            self.end(None, f"step {step}: {type(error).__name__}: {cause(error)}" if error else None)


def describe(run: Run) -> dict[str, Any]:
    """Return the run's settings, how it was launched, and fingerprints of its data."""
    return run.origin.settings | {"launch": vars(run.launch), "data": run.origin.fingerprints}
