"""trackio and TensorBoard, through Accelerate's own trackers."""

import shlex
from collections.abc import Iterator
from dataclasses import dataclass

from accelerate.tracking import GeneralTracker, TensorBoardTracker, TrackioTracker

from src.tracking.guard import Record, Recorder, Tables, describe
from src.training.run import Run

PROJECT = "accelerate-template"
"""Project of trackio that the run is filed under."""


@dataclass
class AccelerateRecorder(Recorder):
    """Passes numbers on to one of Accelerate's trackers."""

    tracker: GeneralTracker
    """One that has not been started."""
    title: str
    where: str
    closing: str

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
        yield AccelerateRecorder(tracker, "trackio", name, f"  trackio    trackio show --project {PROJECT}")
    if "tensorboard" in config.trackers:
        folder = str(config.folder / "tensorboard")
        # of an earlier session that was killed, hide the steps that are taken once more
        tensorboard = TensorBoardTracker("", logging_dir=folder, purge_step=run.progress.step + 1)
        command = f"tensorboard --logdir {shlex.quote(folder)}"
        yield AccelerateRecorder(tensorboard, "TB", folder, f"  TB         {command}")
