"""What every tracker of a run has in common: whatever happens to it, the training neither ends nor waits for it."""

import math
import queue
import tempfile
import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from src.checkpoint.folder import read_lines
from src.config.errors import cause
from src.tasks.base import Table

START_SECONDS = 240.0
"""How long a tracker may take to start: W&B gives up on its server after 90."""
HANG_SECONDS = 60.0
"""How long it may then take for one record, which it only has to accept from this machine, before it counts as hung."""
FINISH_SECONDS = 120.0
"""How long the end of a run waits for pending uploads."""
PROBE_BYTES = 2**16
"""Written to make sure that there is room: on a full disk trackers silently lose records."""

Record = dict[str, Any]


class Logger:
    """Passes records on to a tracker in a thread of its own, one after the other; after a failure, drops them.

    A subclass talks to the tracker in `start`, `recorded`, `write`, `summary`, `alerted`, `stopped` and `end`, which
    the thread calls and which may raise or hang, and cuts off one that did in `abandon`.
    """

    title = ""
    where = ""
    """Where the run is recorded, in a few words."""
    id: str | None = None
    """By which a later session continues the run; None if it can't."""

    def __init__(self, say: Callable[[str], None], folder: Path, record: Path | None) -> None:
        """Start the tracker and wait for it. `say` tells the user, once, that it failed later on, also from the thread;
        `folder`, where it writes, has to have room; `record` is the run's metrics.jsonl, as far as the run goes on from
        it."""
        self.failure: str | None = None
        """Why the run is not recorded, or not to its end; None if it is."""
        self._say, self._folder = say, folder
        self._queue: queue.SimpleQueue[Callable[[], object] | None] = queue.SimpleQueue()
        self._busy_since = math.inf
        self._earlier: dict[int, list[Record]] = {}
        self._is_started = threading.Event()
        self._thread = threading.Thread(target=self._work, daemon=True)
        self._thread.start()
        self._queue.put(self.start)
        if not self._is_started.wait(START_SECONDS):
            self._fail(TimeoutError(f"it has not started within {START_SECONDS:.0f} seconds"))
        if self.failure:
            self.where = f"not recorded: {self.failure}"
        elif record and record.exists() and (size := record.stat().st_size):
            self.tell(lambda: self._catch_up(record, size))

    def log(self, record: Record, tables: dict[str, Table]) -> None:
        """Record numbers, `step` among them, and tables."""
        self.tell(lambda: self.pass_on(record, tables))

    def summarize(self, summary: Record) -> None:
        """Record what came out of the run."""
        self.tell(lambda: self.summary(summary))

    def alert(self, crash: str) -> None:
        """Notify those who watch the run that it crashed."""
        self.tell(lambda: self.alerted(crash))

    def mark_stopped(self) -> None:
        """Record that the run was stopped and will be continued."""
        self.tell(self.stopped)

    def finish(self, exit_code: int) -> None:
        """End the run, and wait until all is written and, online, uploaded."""
        self.tell(lambda: self.end(exit_code))
        self._queue.put(None)
        seconds = HANG_SECONDS if self.failure else FINISH_SECONDS + HANG_SECONDS
        self._thread.join(seconds)
        if self._thread.is_alive():
            self._fail(TimeoutError(f"it has not answered for {seconds:.0f} seconds"))

    def tell(self, do: Callable[[], object]) -> None:
        """Have the thread call `do`."""
        if time.monotonic() - self._busy_since > HANG_SECONDS:
            self._fail(TimeoutError(f"it has not answered for {HANG_SECONDS:.0f} seconds"))
        if self.failure is None:
            self._queue.put(do)

    def closing_line(self) -> str | None:
        """Return where to see the run; None if it failed."""
        return None

    def start(self) -> None:
        """Begin or continue the run."""
        raise NotImplementedError

    def recorded(self) -> Iterable[Record]:
        """Return the numbers that earlier sessions have left there, with their steps."""
        return ()

    def write(self, record: Record, tables: dict[str, Table]) -> None:
        raise NotImplementedError

    def summary(self, summary: Record) -> None: ...
    def alerted(self, crash: str) -> None: ...
    def stopped(self) -> None: ...
    def end(self, exit_code: int) -> None: ...
    def abandon(self) -> None: ...

    def pass_on(self, record: Record, tables: dict[str, Table]) -> None:
        """Write a record, unless an earlier session has: up to perf/…, a resumed run computes the same once more."""
        self._busy_since = time.monotonic()
        numbers = {name: value for name, value in record.items() if not name.startswith("perf/")}.items()
        earlier = self._earlier.get(record["step"], ())
        if not any(all(there.get(name) == value for name, value in numbers) for there in earlier):
            self.write(record, tables)

    def _catch_up(self, file: Path, size: int) -> None:
        """Pass on the first `size` bytes of metrics.jsonl: a tracker that was killed or failed lacks some of them."""
        for there in self.recorded():
            self._earlier.setdefault(there["step"], []).append(there)
        for record in filter(None, read_lines(file, end=size)):
            tables = {name: record.pop(name) for name in list(record) if isinstance(record[name], list)}
            self.pass_on(record, tables)

    def _work(self) -> None:
        for do in iter(self._queue.get, None):
            self._busy_since = time.monotonic()
            try:
                require_room(self._folder)
                do()
            except Exception as error:  # from the tracker or the file system: no reason not to train
                self._fail(error)
            self._busy_since = math.inf
            self._is_started.set()
            if self.failure:
                break

    def _fail(self, error: Exception) -> None:
        if self.failure is None:
            self.failure = cause(error)
            threading.Thread(target=self.abandon, daemon=True).start()
            if self._is_started.is_set():
                self._say(f"WARNING: {self.title} failed ({self.failure}): the run goes on, recorded in metrics.jsonl")


def require_room(folder: Path) -> None:
    """Raise an OSError if nothing more can be written there, or where it will be made."""
    with tempfile.TemporaryFile(dir=folder if folder.exists() else folder.parent) as file:
        file.write(bytes(PROBE_BYTES))
