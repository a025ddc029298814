"""trackio and TensorBoard, through Accelerate's own trackers."""

import contextlib
import io
import shlex
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

from accelerate.tracking import GeneralTracker, TensorBoardTracker, TrackioTracker

from src.tasks.base import Table
from src.tracking.guard import Guarded, Record, Recorder, describe
from src.training.run import Run

PROJECT = "accelerate-template"
"""Project of trackio that the run is filed under."""


class AccelerateRecorder(Recorder):
    """Passes numbers on to one of Accelerate's trackers, which `start` makes."""

    tracker: GeneralTracker

    def __init__(self, name: str, run_id: str) -> None:
        """Keep the name of the run, and the id by which a later session gives it the same name."""
        self.name, self.id = f"{name}-{run_id}", run_id

    def log(self, record: Record, tables: dict[str, Table]) -> None:
        numbers = {name: value for name, value in record.items() if name != "step"}
        self.tracker.log(numbers, step=record["step"])

    def finish(self, exit_code: int) -> None:
        self.tracker.finish()


class Trackio(AccelerateRecorder):
    """Records numbers where trackio's variables say: by default in a database under the user's home."""

    title = "trackio"

    def __init__(self, name: str, run_id: str, settings: dict[str, Any]) -> None:
        super().__init__(name, run_id)
        self._settings = settings

    def start(self) -> None:
        self.tracker = TrackioTracker(PROJECT, name=self.name, resume="allow")
        self.tracker.start()
        self.tracker.store_init_configuration(self._settings)
        self.where = f"{self.name} in {import_module('trackio.utils').TRACKIO_DIR}"

    def closing_line(self) -> str | None:
        return f"  trackio    trackio show --project {PROJECT}"


class TensorBoard(AccelerateRecorder):
    """Records numbers, in single precision, in the run's folder `tensorboard`."""

    title = "TB"

    def __init__(self, name: str, run_id: str, folder: Path, first_step: int) -> None:
        super().__init__(name, run_id)
        self._first_step = first_step
        self.where = str(folder / "tensorboard")

    def start(self) -> None:
        # of an earlier session that was killed, hide the steps that are taken once more
        self.tracker = TensorBoardTracker("", logging_dir=self.where, purge_step=self._first_step + 1)
        self.tracker.start()

    def closing_line(self) -> str | None:
        return f"  TB         tensorboard --logdir {shlex.quote(self.where)}"


def start_trackers(run: Run, say: Callable[[str], None], run_id: str) -> list[Guarded]:
    """Start trackio and TensorBoard as far as the settings name them.

    Args:
        say: tells the user that one of them failed.
        run_id: part of the run's name there.
    """
    config = run.config
    recorders: list[Recorder] = []
    if "trackio" in config.trackers:
        recorders.append(Trackio(config.run_name, run_id, describe(run)))
    if "tensorboard" in config.trackers:
        recorders.append(TensorBoard(config.run_name, run_id, config.folder, run.progress.step))
    # trackio prints; this thread silences it, as the recorder's own may hang
    with contextlib.redirect_stdout(io.StringIO()):
        return [Guarded(recorder, say, config.folder) for recorder in recorders]
