"""The settings of Weights & Biases. What records a run there is in src/tracking/wandb.py."""

from typing import Literal

from src.config.settings import Settings

Keep = Literal["no", "reference", "copy"]


class Wandb(Settings):
    """Weights & Biases. Its own WANDB_* environment variables work too."""

    mode: Literal["auto", "online", "offline", "disabled"] = "auto"
    """auto: WANDB_MODE, else online where there are credentials, else offline."""
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
