"""The settings of learning rates per part of a model, and of frozen parts; src/training/rates.py applies them."""

from collections.abc import Iterator
from re import Pattern
from typing import Annotated

from pydantic import Field, PositiveFloat

from src.config.optim import OptimSettings
from src.config.settings import Settings


class ParameterGroup(Settings):
    """Configures the parameters whose names match, as `named_parameters` of the task's model has them."""

    match: Pattern[str]
    lr_scale: PositiveFloat = 1.0
    frozen: bool = False


class RateSettings(OptimSettings):
    """Adds learning rates per part, and frozen parts."""

    groups: list[ParameterGroup] = []
    r"""Parameters with a rate of their own, or frozen, by regular expressions for their whole names:
    [{match: 'backbone\..*', lr_scale: 0.1}, {match: '.*embed.*', frozen: true}]. The first match counts."""
    layer_decay: Annotated[float, Field(gt=0, lt=1)] | None = None
    """Factor of the learning rate from each of the model's blocks to the one before; the deepest block, and what comes
    after it, has the full rate, the embeddings the lowest. null: one rate."""

    def validation_errors(self) -> Iterator[str]:
        yield from super().validation_errors()
        for group in self.groups:
            if group.frozen and group.lr_scale != 1:
                yield f"optim.groups: {group.match.pattern} is frozen, so its lr_scale has no effect: remove one"
