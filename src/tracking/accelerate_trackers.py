"""trackio, TensorBoard, MLflow and Comet, through Accelerate's own trackers."""

import os
import shlex
from importlib import import_module

from accelerate.tracking import CometMLTracker, GeneralTracker, MLflowTracker, TensorBoardTracker, TrackioTracker

from src.config.settings import flatten
from src.config.terminal import BIN
from src.tracking.guarded import TrackerPart, guarded
from src.tracking.part import Entry, Tables

PROJECT = "accelerate-template"
"""The run's project in trackio and Comet, and its experiment in MLflow."""


class AcceleratePart(TrackerPart):
    """Logs numbers through one of Accelerate's trackers."""

    _tracker: GeneralTracker

    def log(self, entry: Entry, tables: Tables) -> None:
        numbers = {name: value for name, value in entry.items() if name != "step" and value is not None}
        self._tracker.log(numbers, step=entry["step"])

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


class MLflow(AcceleratePart):
    """Logs a run to MLflow. A resumed run continues the one there whose name has its id."""

    tracker, title = "mlflow", "MLflow"

    def start(self) -> None:
        # a minute, in which a server may restart; by default it is longer than HANG_SECONDS
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "5")
        mlflow, self.where = import_module("mlflow"), f"{self._run.config.run_name}-{self._id}"
        tracker = self._tracker = MLflowTracker(PROJECT, run_name=self.where)
        ours = f"run_name LIKE '%-{self._id}'"
        for run in mlflow.search_runs(filter_string=ours, search_all_experiments=True, output_format="list"):
            tracker.run_id = run.info.run_id
        tracker.start()
        # with the values that it has, as MLflow refuses others
        tracker.store_init_configuration(dict(flatten(self.tracked_config())) | tracker.tracker.data.params)
        uri = mlflow.get_tracking_uri()
        if "sqlite" in uri:  # on a server, MLflow prints the run's address
            self.closing = f"  MLflow     {BIN}mlflow server --backend-store-uri {shlex.quote(uri)}"

    def end(self, summary: Entry | None, crash: str | None) -> None:
        import_module("mlflow").end_run("FAILED" if crash else "FINISHED" if summary else "KILLED")


class Comet(AcceleratePart):
    """Logs a run to Comet, under its id filled up with zeros to a key: online or, without credentials, into files."""

    tracker, title = "comet_ml", "Comet"

    def start(self) -> None:
        os.environ.setdefault("COMET_LOGGING_CONSOLE", "ERROR")
        comet, folder = import_module("comet_ml"), str(self.folder / "comet")
        self._tracker = CometMLTracker(
            comet.get_config("comet.project_name") or PROJECT,
            experiment_key=f"{self._id:0>32}",
            online=None if comet.get_config("comet.api_key") else False,
            experiment_config=comet.ExperimentConfig(
                name=self._run.config.run_name, offline_directory=folder, auto_output_logging=False
            ),
        )
        self._tracker.start()
        self._tracker.store_init_configuration(self.tracked_config())
        self.where = self._tracker.tracker.url or f"offline: {BIN}comet upload {shlex.quote(folder)}/*.zip"
        self.closing = f"  Comet      {self.where}"


accelerate_parts = [guarded(kind) for kind in (Trackio, TensorBoard, MLflow, Comet)]
