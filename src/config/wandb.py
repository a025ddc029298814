"""The settings of Weights & Biases; src/tracking/wandb.py logs to it."""

import os
import re
from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import Field

from src.config.settings import ResumeSafe, Settings
from src.config.trackers import Tracker, TrackerSettings

Keep = Literal["no", "reference", "copy"]
RULES = {
    "WANDB_MODE": ("online|offline|disabled|shared|run|dryrun", "online, offline or disabled"),
    "WANDB_PROJECT": (r"[^/\\#?%:]{1,128}", "up to 128 characters, but none of / \\ # ? % :"),
    "WANDB_TAGS": ("[^,]{1,64}(,[^,]{1,64})*", "tags of up to 64 characters, with a comma between two"),
    "WANDB_RUN_ID": (r"[\w.-]{1,128}", "up to 128 letters, digits, dots, - and _"),  # which names artifacts
    "WANDB_API_KEY": (r"\S+", "a key without spaces"),
}
"""What W&B takes for its environment variables: a regular expression, and in words."""


class Wandb(Settings):
    """Weights & Biases. Its WANDB_* environment variables work too."""

    mode: Literal["auto", "online", "offline", "disabled"] = "auto"
    """auto: WANDB_MODE or WANDB_DISABLED, else online if there are credentials, else offline."""
    project: Annotated[str | None, Field(pattern=f"^{RULES['WANDB_PROJECT'][0]}$")] = None
    """Project of the run; null: WANDB_PROJECT, else accelerate-template."""
    entity: str | None = None
    """User or team that owns the project; null: WANDB_ENTITY, else the account's default."""
    tags: list[Annotated[str, Field(min_length=1, max_length=64)]] | None = None
    """Labels to filter runs by; null: WANDB_TAGS."""
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


class WandbSettings(TrackerSettings):
    """Logging to Weights & Biases, and its sweeps."""

    trackers: ResumeSafe[list[Tracker]] = ["wandb"]
    """Where to log besides metrics.jsonl: wandb, trackio, tensorboard, mlflow, comet_ml."""
    wandb: ResumeSafe[Wandb] = Wandb()

    @property
    def folder_name(self) -> str:
        """Return run_name; in a sweep with the trial's id, as `wandb agent` repeats one command."""
        return self.run_name + (f"-{os.environ.get('WANDB_RUN_ID')}" if os.environ.get("WANDB_SWEEP_ID") else "")

    def validation_errors(self) -> Iterator[str]:
        yield from super().validation_errors()
        if "wandb" in self.trackers and self.wandb.chosen_mode != "disabled":
            for name, (pattern, words) in RULES.items():
                value = os.environ.get(name)
                if value and not re.fullmatch(pattern, value):  # which is not shown, as it may be a secret
                    yield f"{name} is set in the environment, but must be {words}"
        if os.environ.get("WANDB_SWEEP_ID") and not re.fullmatch(r"[\w.-]+", os.environ.get("WANDB_RUN_ID", "")):
            yield "WANDB_SWEEP_ID is set in the environment, but WANDB_RUN_ID is no trial's id, one word: unset it"
