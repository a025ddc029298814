"""A run in Weights & Biases that neither ends nor delays the training, whatever happens to it."""

import contextlib
import logging
import os
import queue
import shlex
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import wandb

from src.process import cause

FINISH_SECONDS = 120.0
"""How long the end of a run waits for pending uploads; `wandb sync` uploads the rest."""
HANG_SECONDS = 60.0
"""How long W&B's service, which only has to accept a record from this machine, may take before it counts as hung."""
PROBE_BYTES = 2**16
"""Written to make sure that there is room: on a full disk the service silently loses records."""


class WandbLogger:
    """Passes records on to W&B in a thread of its own, one after the other; after a failure, drops them."""

    title = "W&B"

    def __init__(self, say: Callable[[str], None], **arguments: Any) -> None:
        """Start the run; go offline if it can't go online.

        Args:
            say: tells the user, once, that it failed.
            arguments: of wandb.init, whose `mode` may be "auto" too; `dir` is the run's output folder.
        """
        self.failure: str | None = None
        """Why the run is not recorded, or not to its end; None if it is."""
        self.run: Any = None
        """The W&B run, only to be read from; None if there is none."""
        self._say = say
        self._is_said = False
        self._queue: queue.SimpleQueue[Callable[[Any], object] | None] = queue.SimpleQueue()
        self._busy_since: float | None = None
        self._thread = threading.Thread(target=self._work, daemon=True)
        self.where = ""
        """Where the run is recorded, in a few words."""
        # it is reported once, here, that the service is gone, and not by asyncio for each record
        logging.getLogger("asyncio").addFilter(lambda record: record.msg != "socket.send() raised exception.")
        try:
            self.run, self.where = _start(**arguments)
        except Exception as error:  # from W&B or the file system: no reason not to train
            self._fail(error)
            self.where, self._is_said = f"not recorded: {self.failure}", True
        self._thread.start()
        if "dir" in arguments:
            self.tell(lambda run: Path(arguments["dir"], "wandb", "run_id").write_text(run.id))

    @property
    def id(self) -> str | None:
        """The id by which a later session continues the run; None if there is none."""
        return self.run.id if self.run else None

    def tell(self, do: Callable[[Any], object]) -> None:
        """Have the thread call `do` with the W&B run."""
        if self._busy_since is not None and time.monotonic() - self._busy_since > HANG_SECONDS:
            self._fail(TimeoutError(f"its service has not answered for {HANG_SECONDS:.0f} seconds"))
        self._say_failure()
        if self.run is not None and self.failure is None:
            self._queue.put(do)

    def log(self, record: dict[str, Any], tables: dict[str, list[dict[str, Any]]]) -> None:
        """Record numbers, and tables whose rows have the same keys."""
        self.tell(lambda run: run.log(record | {name: _table(rows) for name, rows in tables.items()}))

    def summarize(self, summary: dict[str, Any]) -> None:
        self.tell(lambda run: run.summary.update(summary))

    def alert(self, title: str, text: str) -> None:
        """Notify those who watch the run."""
        self.tell(lambda run: run.alert(title, text))

    def mark_stopped(self) -> None:
        self.tell(lambda run: run.mark_preempting())

    def finish(self, exit_code: int) -> None:
        """End the run, and wait until all is written and, online, uploaded."""
        self.tell(lambda run: run.finish(exit_code=exit_code))
        self._queue.put(None)
        self._thread.join(FINISH_SECONDS + HANG_SECONDS)
        if self._thread.is_alive():
            self._fail(TimeoutError(f"its service has not answered for {FINISH_SECONDS + HANG_SECONDS:.0f} seconds"))
        self._say_failure()

    def closing_line(self) -> str | None:
        """Return where to see the run, or how to upload it; None if it failed."""
        if self.run is None or self.failure:
            return None
        if self.run.offline:
            return f"  upload     wandb sync {shlex.quote(str(Path(self.run.settings.sync_dir)))}"
        return f"  W&B        {self.run.url}"

    def _work(self) -> None:
        while self.failure is None and (do := self._queue.get()) is not None:
            self._busy_since = time.monotonic()
            try:
                _require_room(os.path.dirname(self.run.settings.sync_dir))
                do(self.run)
            except Exception as error:
                self._fail(error)
            self._busy_since = None

    def _fail(self, error: Exception) -> None:
        if self.failure is None:
            self.failure = cause(error)
            logging.getLogger("wandb").handlers = [logging.NullHandler()]  # its file may be on a full disk
            if self.run is not None:
                threading.Thread(target=_abandon, daemon=True).start()

    def _say_failure(self) -> None:
        if self.failure and not self._is_said:
            self._is_said = True
            self._say(f"WARNING: W&B failed ({self.failure}): the run goes on, recorded in metrics.jsonl alone")


def _start(mode: Any, project: str | None = None, **arguments: Any) -> tuple[Any, str]:
    why = "as asked"
    if mode == "auto":
        mode = None if "WANDB_MODE" in os.environ else "online"
        if mode and not wandb.login(prompt=False, verify=False):
            mode, why = "offline", "no credentials: `wandb login` for online"
    if "dir" in arguments:
        folder = Path(arguments["dir"], "wandb")
        _require_room(folder if folder.exists() else folder.parent)
    arguments["project"] = project or os.environ.get("WANDB_PROJECT", "accelerate-template")
    arguments["settings"] = wandb.Settings(silent=True, finish_timeout=FINISH_SECONDS, finish_timeout_raises=True)
    try:
        run = wandb.init(mode=mode, **arguments)
    except wandb.errors.Error as error:
        mode, why = "offline", f"could not go online: {str(error).splitlines()[0]}"
        run = wandb.init(mode=mode, **arguments)
    if run.disabled:
        return None, "disabled"
    run.define_metric("step", hidden=True)
    run.define_metric("*", step_metric="step")  # wandb's own counter drops steps after a resume
    return run, f"offline ({why})" if run.offline else str(run.url)


def _require_room(folder: str | Path) -> None:
    """Raise an OSError if nothing more can be written there."""
    with tempfile.TemporaryFile(dir=folder) as file:
        file.write(bytes(PROBE_BYTES))


def _abandon() -> None:
    """Kill W&B's service, whatever its state: this process could not end while one hangs."""
    for child in psutil.Process().children():
        if child.name().startswith("wandb-core"):
            for process in (*child.children(recursive=True), child):
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()
    with contextlib.suppress(Exception):
        wandb.teardown()


def _table(rows: list[dict[str, Any]]) -> Any:
    return wandb.Table(columns=list(rows[0]), data=[list(row.values()) for row in rows])
