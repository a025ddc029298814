"""The trackers that a run can choose: Weights & Biases and, through Accelerate's own, trackio and TensorBoard."""

import contextlib
import io
import shlex
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

from accelerate.tracking import GeneralTracker, TensorBoardTracker, TrackioTracker

from src.config.config import Config
from src.tasks.base import Table
from src.tracking.loggers import Logger, Record

PROJECT = "accelerate-template"
"""Project of trackio that the run is filed under."""


class AccelerateLogger(Logger):
    """Passes numbers on to one of Accelerate's trackers, which `start` makes."""

    _tracker: GeneralTracker

    def __init__(self, say: Callable[[str], None], folder: Path, run_id: str, config: dict[str, Any]) -> None:
        self.id, self._name, self._config = run_id, f"{config['run_name']}-{run_id}", config
        with contextlib.redirect_stdout(io.StringIO()):  # of trackio's lines; by this thread, as the other may hang
            super().__init__(say, folder, folder / "metrics.jsonl")

    def write(self, record: Record, tables: dict[str, Table]) -> None:
        self._tracker.log({name: value for name, value in record.items() if name != "step"}, step=record["step"])

    def end(self, exit_code: int) -> None:
        self._tracker.finish()


class Trackio(AccelerateLogger):
    """Records numbers where trackio's variables say: by default in a database under the user's home."""

    title = "trackio"

    def start(self) -> None:
        self._tracker = TrackioTracker(PROJECT, name=self._name, resume="allow")
        self._tracker.start()
        self._tracker.store_init_configuration(self._config)
        self._folder = import_module("trackio.utils").TRACKIO_DIR
        self._folder.mkdir(parents=True, exist_ok=True)
        self.where = f"{self._name} in {self._folder}"

    def recorded(self) -> list[Record]:
        return import_module("trackio.sqlite_storage").SQLiteStorage.get_logs(PROJECT, self._name)

    def closing_line(self) -> str | None:
        return None if self.failure else f"  trackio    trackio show --project {PROJECT}"


class TensorBoard(AccelerateLogger):
    """Records numbers, in single precision, in the run's folder `tensorboard`."""

    title = "TB"

    def start(self) -> None:
        self._folder /= "tensorboard"
        # hides what earlier sessions have written: what counts of it is in metrics.jsonl
        self._tracker = TensorBoardTracker("", logging_dir=self._folder, purge_step=0)
        self._tracker.start()
        self.where = str(self._folder)

    def closing_line(self) -> str | None:
        return None if self.failure else f"  TB         tensorboard --logdir {shlex.quote(str(self._folder))}"


def start_trackers(config: Config, say: Callable[[str], None], run_id: str, **arguments: Any) -> list[Any]:
    """Return the loggers of `config.trackers`, apart from W&B's. They take their run's name from `run_id`."""
    kinds: dict[str, type[AccelerateLogger]] = {"trackio": Trackio, "tensorboard": TensorBoard}
    return [
        kind(say, arguments["dir"], run_id, arguments["config"])
        for name, kind in kinds.items()
        if name in config.trackers
    ]
