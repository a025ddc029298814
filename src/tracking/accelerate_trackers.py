"""trackio and TensorBoard, through Accelerate's own trackers."""

import shlex

from accelerate.tracking import GeneralTracker, TensorBoardTracker, TrackioTracker

from src.tracking.guard import Risky, describe
from src.tracking.part import Record, Tables

PROJECT = "accelerate-template"
"""Project of trackio that the run is filed under."""


class AcceleratePart(Risky):
    """Passes numbers on to one of Accelerate's trackers."""

    _tracker: GeneralTracker

    def start(self) -> None:
        self._tracker.start()

    def log(self, record: Record, tables: Tables) -> None:
        numbers = {name: value for name, value in record.items() if name != "step"}
        self._tracker.log(numbers, step=record["step"])

    def end(self, summary: Record | None, crash: str | None) -> None:
        self._tracker.finish()


class Trackio(AcceleratePart):
    """Records a run in trackio. With the same id, a later session continues it."""

    title = "trackio"
    closing = f"  trackio    trackio show --project {PROJECT}"

    @property
    def is_on(self) -> bool:
        return "trackio" in self._run.config.trackers

    def start(self) -> None:
        self.where = f"{self._run.config.run_name}-{self._id}"
        self._tracker = TrackioTracker(PROJECT, name=self.where, resume="allow", config=describe(self._run))
        super().start()


class TensorBoard(AcceleratePart):
    """Records a run for TensorBoard, into its folder."""

    title = "TB"

    @property
    def is_on(self) -> bool:
        return "tensorboard" in self._run.config.trackers

    def start(self) -> None:
        self.where = str(self._run.config.folder / "tensorboard")
        self.closing = f"  TB         tensorboard --logdir {shlex.quote(self.where)}"
        # of an earlier session that was killed, hide the steps that are taken once more
        self._tracker = TensorBoardTracker("", logging_dir=self.where, purge_step=self._run.progress.step + 1)
        super().start()
