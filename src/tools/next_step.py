"""What to do with a model that was trained, said at the end of its run."""

import shlex

from src.tracking.part import Part, Record


class NextStep(Part):
    """Names the program that the run's task is used with first."""

    title = "next step"

    def end(self, summary: Record | None, crash: str | None) -> None:
        word, program = self._run.task.next_step
        self.closing = f"  {word:<10} python -m {program} {shlex.quote(str(self._run.config.folder))}"
