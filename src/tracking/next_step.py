"""Say what to do with a trained model, at the end of its run."""

import shlex

from src.config.terminal import BIN
from src.tracking.part import Entry, Part


class NextStep(Part):
    """Names the program to use the task's model with."""

    title = "next step"

    def end(self, summary: Entry | None, crash: str | None) -> None:
        if summary:
            word, module = self._run.task.next_step
            self.closing = f"  {word:<10} {BIN}python -m {module} {shlex.quote(str(self.folder))}"
