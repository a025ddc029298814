"""The settings of Weights & Biases; src/tracking/wandb.py logs to it."""

import os
from collections.abc import Iterator
from typing import Literal

from src.config.settings import Settings

Keep = Literal["no", "reference", "copy"]
MODES = ("auto", "online", "offline", "disabled", "shared", "run", "dryrun")
"""The modes of wandb.init, including two old names, and our own `auto`."""


class Wandb(Settings):
    """Weights & Biases. Its WANDB_* environment variables work too."""

    mode: Literal["auto", "online", "offline", "disabled"] = "auto"
    """auto: WANDB_MODE or WANDB_DISABLED, else online if there are credentials, else offline."""
    project: str | None = None
    """Project of the run; null: WANDB_PROJECT, else accelerate-template."""
    entity: str | None = None
    """User or team that owns the project; null: WANDB_ENTITY, else the account's default."""
    tags: list[str] = []
    """Labels to filter runs by."""
    group: str | None = None
    """Group that related runs share; null: WANDB_RUN_GROUP."""
    job_type: str | None = None
    """Kind of run, such as train; null: WANDB_JOB_TYPE."""
    notes: str | None = None
    """Notes on the run; null: WANDB_NOTES."""
    model: Keep = "reference"
    """Log the exported model as an artifact: no, a reference to its files, or a copy of them."""
    checkpoints: Keep = "no"
    """Log each checkpoint likewise, with the aliases latest and step-N."""

    @property
    def chosen_mode(self) -> str:
        """Return the mode, resolving auto from the environment."""
        if self.mode != "auto":
            return self.mode
        if os.environ.get("WANDB_DISABLED", "").lower() in ("true", "1", "yes", "on"):
            return "disabled"
        return os.environ.get("WANDB_MODE") or "auto"

    def environment_errors(self) -> Iterator[str]:
        """Yield an error line if WANDB_MODE is not one of W&B's modes."""
        if self.chosen_mode not in MODES:
            yield f"WANDB_MODE={self.chosen_mode} is set in the environment: must be online, offline or disabled"
