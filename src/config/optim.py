"""The settings of the optimizer."""

from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import Field, NonNegativeFloat, PositiveFloat

from src.config.settings import Settings

Fraction = Annotated[float, Field(ge=0, lt=1)]


class OptimSettings(Settings):
    """Settings of the optimizer and its learning rate."""

    name: Literal["adamw", "sgd", "adadelta"] = "adamw"
    """Optimizer."""
    lr: PositiveFloat = 3e-3
    """Peak learning rate."""
    weight_decay: NonNegativeFloat = 0.01
    """Weight decay, decoupled for adamw and muon; never applied to biases, norms and other vectors."""
    betas: tuple[Fraction, Fraction] = (0.9, 0.999)
    """Decay rates of adamw's first and second moments."""
    momentum: Fraction = 0.9
    """Momentum of sgd and muon."""
    max_grad_norm: PositiveFloat | None = None
    """Global L2 norm to clip gradients to; null: no clipping."""
    schedule: Literal["constant", "linear", "cosine", "step", "one_cycle", "wsd"] = "one_cycle"
    """Shape of the learning-rate schedule: see lr_at in src/training/optim.py."""
    warmup_steps: NonNegativeFloat = 0.3
    """Steps to reach the peak; a value below 1 is a fraction of the schedule."""
    final_lr_ratio: Annotated[float, Field(ge=0, le=1)] = 0.0
    """Final learning rate of a decaying schedule, as a fraction of the peak."""
    decay_steps: NonNegativeFloat = 0.2
    """Steps over which schedule=wsd decays at its end; a value below 1 is a fraction of the schedule."""
    decay_factor: Annotated[float, Field(gt=0, le=1)] = 0.7
    """Factor by which schedule=step multiplies the learning rate."""
    decay_epochs: PositiveFloat = 1.0
    """Epochs between multiplications."""

    def validation_errors(self) -> Iterator[str]:
        if self.warmup_steps > 1 and self.warmup_steps % 1:
            must = "must be a whole number of steps or, below 1, a fraction of the schedule"
            yield f"optim.warmup_steps={self.warmup_steps}: {must}"

    def decay_errors(self, schedule_steps: float) -> Iterator[str]:
        """Yield an error line for wrong decay_steps. A schedule whose length is not known yet is infinite."""
        warmup, decay = self.warmup_steps, self.decay_steps
        fraction = sum(steps if steps < 1 else steps / schedule_steps for steps in (warmup, decay))
        if self.schedule == "wsd":
            if fraction > 1.000001:
                both = f"optim.warmup_steps={warmup:g} and optim.decay_steps={decay:g}"
                yield f"{both}: together {fraction:.1%} of the schedule"
        elif decay != OptimSettings().decay_steps:
            yield f"optim.decay_steps={decay:g}: only applies to optim.schedule=wsd, not {self.schedule}"
