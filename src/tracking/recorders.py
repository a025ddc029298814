"""What records a run besides metrics.jsonl, all of it together: Weights & Biases, trackio, TensorBoard."""

import contextlib
import io
import os
import uuid
from collections.abc import Callable

from src.config.errors import cause
from src.tracking.accelerate_trackers import accelerate_recorders
from src.tracking.guard import Guarded, Record, Recorder, Tables
from src.tracking.wandb import wandb_recorders
from src.training.run import Run


class Recorders:
    """The recorders that the settings name; only on the main process."""

    def __init__(self, run: Run, say: Callable[[str], None]) -> None:
        """Start them. `say` tells the user that one failed."""
        self._run, resume = run, run.resume
        own = resume.state.wandb_id if resume.state and resume.is_own(run.config) else None
        self.run_id = own or os.environ.get("WANDB_RUN_ID") or uuid.uuid4().hex[:8]
        """The id by which a later session continues the run there. A sweep's agent sets the variable."""
        recorders: list[Recorder] = []
        if run.is_main:
            recorders += wandb_recorders(run, self.run_id)  # room: wandb
            recorders += accelerate_recorders(run, self.run_id)  # room: trackers
        # trackio prints; this thread silences it, as the recorder's own may hang
        with contextlib.redirect_stdout(io.StringIO()):
            self._all = [Guarded(recorder, say) for recorder in recorders]

    @property
    def where(self) -> dict[str, str]:
        """Return where each of them records the run, or why it does not, by its title."""
        return {
            of.recorder.title: f"not recorded: {of.failure}" if of.failure else of.recorder.where for of in self._all
        }

    def log(self, record: Record, tables: Tables) -> None:
        """Record numbers, `step` among them, and tables."""
        for of in self._all:
            of.tell(of.recorder.log, record, tables)

    def closing_lines(self) -> list[str]:
        """Return the lines that tell the user how to see the run."""
        return [of.recorder.closing for of in self._all if not of.failure]

    def finish(self, error: BaseException | None, summary: Record | None) -> dict[str, str]:
        """End them, with an alert if the run crashed. Return why each failed, of those that did, by title."""
        crash = f"step {self._run.progress.step}: {type(error).__name__}: {cause(error)}" if error else None
        for of in self._all:
            of.finish(summary, crash)
        return {of.recorder.title: of.failure for of in self._all if of.failure}
