"""The names of what can record a run besides metrics.jsonl."""

from typing import Literal

Tracker = Literal[
    "wandb",  # room: wandb
    "trackio",  # room: trackers
    "tensorboard",  # room: trackers
]
