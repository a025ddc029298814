"""trackio and TensorBoard, through Accelerate's own trackers."""

import shlex
from collections.abc import Iterator

from accelerate.tracking import GeneralTracker, TensorBoardTracker, TrackioTracker

from src.tracking.guard import Record, Recorder, Tables, describe
from src.training.run import Run

PROJECT = "accelerate-template"
"""Project of trackio that the run is filed under."""


class AccelerateRecorder(Recorder):
    """Passes numbers on to one of Accelerate's trackers."""

    def __init__(self, title: str, tracker: GeneralTracker, where: str, command: str) -> None:
        """Keep a tracker that has not been started, and the command that shows the run."""
        self.title, self.tracker, self.where = title, tracker, where
        self.closing = f"  {title:<10} {command}"

    def start(self) -> None:
        self.tracker.start()

    def log(self, record: Record, tables: Tables) -> None:
        numbers = {name: value for name, value in record.items() if name != "step"}
        self.tracker.log(numbers, step=record["step"])

    def finish(self, summary: Record | None, crash: str | None) -> None:
        self.tracker.finish()


def accelerate_recorders(run: Run, run_id: str) -> Iterator[Recorder]:
    """Yield those that the settings name. With the same id, a later session continues the run."""
    config = run.config
    if "trackio" in config.trackers:
        name = f"{config.run_name}-{run_id}"
        tracker = TrackioTracker(PROJECT, name=name, resume="allow", config=describe(run))
        yield AccelerateRecorder("trackio", tracker, name, f"trackio show --project {PROJECT}")
    if "tensorboard" in config.trackers:
        folder = str(config.folder / "tensorboard")
        # of an earlier session that was killed, hide the steps that are taken once more
        tensorboard = TensorBoardTracker("", logging_dir=folder, purge_step=run.progress.step + 1)
        yield AccelerateRecorder("TB", tensorboard, folder, f"tensorboard --logdir {shlex.quote(folder)}")
