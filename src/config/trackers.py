"""The names of what can record a run besides metrics.jsonl."""

from importlib.util import find_spec
from typing import Annotated, Literal

from pydantic import AfterValidator


def _require_installed(names: list[str]) -> list[str]:
    if absent := [name for name in names if name != "wandb" and find_spec(name) is None]:
        raise ValueError(f"not installed: pip install {' '.join(absent)}")
    return names


Tracker = Literal[
    "wandb",  # room: wandb
    "trackio",  # room: trackers
    "tensorboard",  # room: trackers
]
Trackers = Annotated[list[Tracker], AfterValidator(_require_installed)]
