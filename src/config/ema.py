"""The settings of a moving average of the weights; src/training/ema.py keeps it."""

from collections.abc import Iterator
from typing import Annotated

from pydantic import Field

from src.config.run import RunSettings
from src.config.settings import Settings


class Ema(Settings):
    """Configures an exponential moving average of the trained weights."""

    decay: Annotated[float, Field(gt=0, lt=1)] | None = None
    """Weight of the average so far in each step, such as 0.999; null: no average."""
    evaluate: bool = True
    """Evaluate and export the average in place of the weights. Checkpoints have both."""

    def validation_errors(self) -> Iterator[str]:
        if self.decay is None and not self.evaluate:
            yield "ema.decay is not set: without an average, ema.evaluate has no effect"


class EmaSettings(RunSettings):
    """Adds a moving average of the weights."""

    ema: Ema = Ema()
