"""The setting that chooses trackers."""

from typing import Literal

from src.config.run import RunSettings
from src.config.settings import ResumeSafe

Tracker = Literal[
    "wandb",
    "trackio", "tensorboard", "mlflow", "comet_ml",
]  # fmt: skip


class TrackerSettings(RunSettings):
    """Adds the trackers that a run is logged to."""

    trackers: ResumeSafe[list[Tracker]] = []
    """Where to log besides metrics.jsonl: wandb, trackio, tensorboard, mlflow, comet_ml."""
