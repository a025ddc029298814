"""What happens to a run besides its metrics: events.jsonl, lines in the terminal, and alerts to those who watch it."""

import contextlib
import json
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import fmean, pstdev
from typing import TYPE_CHECKING, Any, Literal

from pydantic import PositiveFloat

from src.checkpoint.output_folder import is_number, read_lines
from src.settings import Settings

if TYPE_CHECKING:  # not at run time: src.config imports this file
    from src.run import Run

USUAL, FEW = 30, 10
"""How many records of the loss say what is usual, at most and at least."""
TAILS = (2**20, 2**26)
"""Bytes at the end of metrics.jsonl in which a resumed run looks for these records, in the second if tables, which may
be long, leave too few of them in the first; all of it would take the longer, the longer it is."""
COMMIT = "git describe --always --abbrev=40 --exclude=* --dirty"


class Alerts(Settings):
    """What those who watch the run in Weights & Biases are told. events.jsonl has all of it."""

    kinds: list[Literal["crash", "skipped", "spike", "end"]] = ["crash", "skipped", "spike"]
    """Of crash, skipped (steps, as their gradients were not finite), spike (of the training loss) and end."""
    spike_z: PositiveFloat = 5.0
    """Standard deviations above the mean of the last records from which a loss is a spike."""


class Events:
    """One of the run's loggers, on the main process: makes events of what it is told."""

    title = where = ""
    id = failure = None

    def __init__(self, run: "Run", say: Callable[[str], None], loggers: list[Any]) -> None:
        """Record the start. `say` prints a line; `loggers` are the others, to be alerted."""
        self._run, self._say, self._loggers, self._settings = run, say, loggers, run.config.alerts
        self._losses: deque[float] = deque(maxlen=USUAL)
        self._skipped = 0
        record = run.config.folder / "metrics.jsonl"
        for tail in TAILS:
            earlier = list(read_lines(record, start=record.stat().st_size - tail))
            if sum(is_number(line.get("train/loss")) for line in earlier) >= USUAL:
                break
        for line in earlier:
            list(self._judge(line))
        if damaged := earlier.count({}):
            say(f"WARNING: {record}: {damaged} of its last lines are damaged, and left out wherever it is read")
        commit = subprocess.run(COMMIT, shell=True, cwd=Path(__file__).parent, capture_output=True, text=True).stdout
        summary = run.resume.summary or "from the beginning"
        self._add("start", summary, command=run.resume_command, commit=commit.strip() or None)  # there may be no git

    def log(self, record: dict[str, Any], tables: dict[str, Any]) -> None:
        for kind, text in self._judge(record):
            self._add(kind, text)

    def summarize(self, summary: dict[str, Any]) -> None:
        self._add("end", ", ".join(f"{name} {summary[name]:.4g}" for name in summary if name.startswith("eval/")))

    def mark_stopped(self, reason: str) -> None:
        self._add("stopped", reason)

    def closing_line(self) -> None: ...

    def finish(self, exit_code: int) -> None:
        if error := sys.exc_info()[1]:  # that the run ends by
            self._add("crash", f"{type(error).__name__}: {error}".splitlines()[-1])

    def _judge(self, record: dict[str, Any]) -> Iterator[tuple[str, str]]:
        """Yield kind and text of what a record shows, which depends on it and earlier records alone."""
        if is_number(loss := record.get("train/loss")):
            if len(self._losses) >= FEW:
                mean = fmean(self._losses)
                deviation = max(pstdev(self._losses), 0.01 * abs(mean))
                if loss > mean + self._settings.spike_z * deviation:
                    yield "spike", f"the training loss is {loss:.4g}, after {mean:.4g} ± {deviation:.2g}"
            self._losses.append(loss)
        skipped = record.get("train/skipped_steps", self._skipped) - self._skipped
        self._skipped += skipped
        if skipped and "train/loss_scale" not in record:  # in fp16 it is how the scale is found
            yield "skipped", f"{skipped} steps since the last record, as their gradients were not finite"

    def _add(self, kind: str, text: str, **more: Any) -> None:
        step = self._run.progress.step
        event = {"time": time.strftime("%Y-%m-%dT%H:%M:%S"), "step": step, "kind": kind, "text": text, **more}
        with contextlib.suppress(OSError), (self._run.config.folder / "events.jsonl").open("a") as file:
            file.write(json.dumps(event) + "\n")
        if kind in ("skipped", "spike"):  # the terminal has the others in any case
            self._say(f"WARNING: {kind}: {text}")
        for logger in self._loggers if kind in self._settings.kinds else ():
            logger.alert(f"{self._run.config.run_name}: {kind}", f"step {step}: {text}")
