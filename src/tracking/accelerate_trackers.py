"""trackio and TensorBoard, through Accelerate's own trackers."""

import shlex

from accelerate.tracking import GeneralTracker, TensorBoardTracker, TrackioTracker

from src.config.terminal import BIN
from src.tracking.guarded import TrackerPart, guarded
from src.tracking.part import Entry, Tables

PROJECT = "accelerate-template"
"""The run's project in trackio."""


class AcceleratePart(TrackerPart):
    """Logs numbers through one of Accelerate's trackers."""

    _tracker: GeneralTracker

    def log(self, entry: Entry, tables: Tables) -> None:
        self._tracker.log({name: value for name, value in entry.items() if name != "step"}, step=entry["step"])

    def end(self, summary: Entry | None, crash: str | None) -> None:
        self._tracker.finish()


class Trackio(AcceleratePart):
    """Logs a run to trackio. With the same id, a resumed run continues there."""

    tracker = title = "trackio"
    closing = f"  trackio    {BIN}trackio show --project {PROJECT}"

    def start(self) -> None:
        self.where = f"{self._run.config.run_name}-{self._id}"
        self._tracker = TrackioTracker(PROJECT, name=self.where, resume="allow", config=self.tracked_config())
        self._tracker.start()


class TensorBoard(AcceleratePart):
    """Logs a run for TensorBoard, into its folder."""

    tracker, title = "tensorboard", "TB"

    def start(self) -> None:
        self.where = str(self.folder / "tensorboard")
        self.closing = f"  TB         {BIN}tensorboard --logdir {shlex.quote(self.where)}"
        # hide the steps that a killed session had logged and this one takes again
        self._tracker = TensorBoardTracker("", logging_dir=self.where, purge_step=self._run.progress.step + 1)
        self._tracker.start()


trackio_part, tensorboard_part = guarded(Trackio), guarded(TensorBoard)
