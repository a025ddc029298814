"""The settings of parts that a copy may leave out."""

from collections.abc import Iterator
from typing import Literal

from src.config.settings import ResumeSafe, Settings
from src.config.wandb import Wandb

Tracker = Literal[  # room: trackers wandb
    "wandb",  # room: wandb
    "trackio",  # room: trackers
    "tensorboard",  # room: trackers
]


class PartSettings(Settings):
    """What a run does, or where it is recorded, by parts that a copy may leave out."""

    check: ResumeSafe[bool] = False  # room: check
    """Check whether this run would be right, instead of training; `--check` is enough: docs/check.md."""
    trackers: ResumeSafe[list[Tracker]] = [  # room: trackers wandb
        "wandb",  # room: wandb
    ]
    """What records the run besides metrics.jsonl: wandb, trackio, tensorboard."""
    wandb: ResumeSafe[Wandb] = Wandb()  # room: wandb

    def validation_errors(self) -> Iterator[str]:  # room: wandb
        yield from super().validation_errors()
        if "wandb" in self.trackers:
            yield from self.wandb.environment_errors()
