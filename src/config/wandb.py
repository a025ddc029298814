"""The settings of Weights & Biases. What records a run there is in src/tracking/wandb.py."""

import os
from collections.abc import Iterator
from typing import Literal

from src.config.settings import Settings

Keep = Literal["no", "reference", "copy"]
MODES = ("auto", "online", "offline", "disabled", "shared", "run", "dryrun")
"""Those of wandb.init, the last two of which are old names, and our own."""


class Wandb(Settings):
    """Weights & Biases. Its own WANDB_* environment variables work too."""

    mode: Literal["auto", "online", "offline", "disabled"] = "auto"
    """auto: WANDB_MODE or WANDB_DISABLED, else online where there are credentials, else offline."""
    project: str | None = None
    """Project that the run is filed under; null: WANDB_PROJECT, else accelerate-template."""
    entity: str | None = None
    """User or team that owns the project; null: WANDB_ENTITY, else the account's default."""
    tags: list[str] = []
    """Labels to find the run by."""
    group: str | None = None
    """Runs that belong together have the same group; null: WANDB_RUN_GROUP."""
    job_type: str | None = None
    """What the run is for, such as train; null: WANDB_JOB_TYPE."""
    notes: str | None = None
    """What to remember about the run; null: WANDB_NOTES."""
    model: Keep = "reference"
    """Record the exported model as an artifact that names its files, or with a copy of them, or no such artifact."""
    checkpoints: Keep = "no"
    """Record each checkpoint likewise, with the aliases latest and step-N."""

    @property
    def chosen_mode(self) -> str:
        """Return the mode, which the environment chooses if it is auto."""
        if self.mode != "auto":
            return self.mode
        if os.environ.get("WANDB_DISABLED", "").lower() in ("true", "1", "yes", "on"):
            return "disabled"
        return os.environ.get("WANDB_MODE") or "auto"

    def environment_errors(self) -> Iterator[str]:
        """Yield a line if WANDB_MODE is none of W&B's modes."""
        if self.chosen_mode not in MODES:
            yield f"WANDB_MODE={self.chosen_mode} is set in the environment: must be online, offline or disabled"
