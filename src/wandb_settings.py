"""The settings of Weights & Biases, apart from its logger, whose import takes half a second."""

import os
from collections.abc import Callable
from importlib import import_module
from typing import Any, Literal

from src.settings import Settings


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

    def start(self, say: Callable[[str], None], **arguments: Any) -> list[Any]:
        """Import and start the logger, and return it in a list; an empty list if W&B is disabled."""
        if "disabled" in (self.mode, self.mode == "auto" and os.environ.get("WANDB_MODE")):
            return []
        return [import_module("src.wandb_logger").WandbLogger(say, **self.model_dump(), **arguments)]
