"""What records a run besides metrics.jsonl, all of it together: Weights & Biases, trackio, TensorBoard."""

import os
import uuid
from collections.abc import Callable

from src.config.errors import cause
from src.tasks.base import Table
from src.tracking.accelerate_trackers import start_trackers
from src.tracking.guard import Guarded, Record
from src.tracking.wandb import start_wandb
from src.training.run import Run


class Recorders:
    """The recorders that the settings name; none on most processes."""

    def __init__(self, run: Run, say: Callable[[str], None]) -> None:
        """Start them. `say` tells the user that one failed."""
        self._run = run
        self._all: list[Guarded] = []
        if run.is_main:
            self._all = self._start(say)
        elif run.accelerator.is_local_main_process:  # room: wandb
            machine = int(os.environ.get("GROUP_RANK", run.rank))
            self._all = start_wandb(run, say, None, machine)

    def _start(self, say: Callable[[str], None]) -> list[Guarded]:
        run, resume = self._run, self._run.resume
        state = resume.state if resume.is_own(run.config) else None
        run_id = state.wandb_id if state else None
        found: list[Guarded] = []
        resumes = "allow" if run_id else None  # room: wandb
        found += start_wandb(run, say, run.config.folder, id=run_id, resume=resumes)  # room: wandb
        run_id = next((r.recorder.id for r in found), None) or run_id or uuid.uuid4().hex[:8]  # room: trackers
        found += start_trackers(run, say, run_id)  # room: trackers
        return found

    @property
    def where(self) -> dict[str, str]:
        """Return where each of them records the run, by its title."""
        return {recorder.recorder.title: recorder.where for recorder in self._all}

    @property
    def run_id(self) -> str | None:
        """Return the id by which a later session continues the run there; None: there is none."""
        return next((recorder.recorder.id for recorder in self._all if recorder.recorder.id), None)

    def log(self, record: Record, tables: dict[str, Table]) -> None:
        """Record numbers, `step` among them, and tables."""
        for recorder in self._all:
            recorder.tell(recorder.recorder.log, record, tables)

    def summarize(self, summary: Record) -> None:
        """Record what came out of the run."""
        for recorder in self._all:
            recorder.tell(recorder.recorder.summarize, summary)

    def mark_stopped(self) -> None:
        """Record that the run was stopped and will be continued."""
        for recorder in self._all:
            recorder.tell(recorder.recorder.mark_stopped)

    def closing_lines(self) -> list[str]:
        """Return the lines that tell the user how to see the run."""
        return [line for recorder in self._all if (line := recorder.closing_line())]

    def finish(self, error: BaseException | None, is_done: bool) -> dict[str, str]:
        """End them, with an alert if the run crashed. Return why each failed, of those that did, by title."""
        for recorder in self._all:
            if error and self._run.is_main:
                crash = f"step {self._run.progress.step}: {type(error).__name__}: {cause(error)}"
                recorder.tell(recorder.recorder.alert, crash)
            recorder.finish(exit_code=0 if is_done else 1)
        return {recorder.recorder.title: recorder.failure for recorder in self._all if recorder.failure}
