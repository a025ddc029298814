"""The groups of settings that each run has: the optimizer, checkpoints, early stopping."""

from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt

from src.config.settings import Reopens, Settings

Share = Annotated[float, Field(ge=0, lt=1)]


class Optim(Settings):
    """The optimizer and its learning rate."""

    name: Literal["adamw", "sgd", "adadelta", "muon"] = "adamw"
    """The optimizer. muon takes the hidden weight matrices and leaves the rest to adamw, at the same rate."""
    lr: PositiveFloat = 3e-3
    """Peak learning rate."""
    weight_decay: NonNegativeFloat = 0.01
    """Weight decay, decoupled for adamw and muon. Biases, norms and other vectors never decay."""
    betas: tuple[Share, Share] = (0.9, 0.999)
    """Decay rates of adamw's first and second moment."""
    momentum: Share = 0.9
    """Momentum of sgd and muon."""
    max_grad_norm: PositiveFloat | None = None
    """Global L2 norm that gradients are clipped to; null: no clipping."""
    schedule: Literal[
        "constant",
        "linear",
        "cosine",
        "step",
        "one_cycle",
        "wsd",
    ] = "one_cycle"
    """Shape of the learning-rate curve: see lr_at in src/training/optim.py."""
    warmup_steps: NonNegativeFloat = 0.3
    """Steps until the peak is reached; a value below 1 is a share of the schedule."""
    final_lr_ratio: Annotated[float, Field(ge=0, le=1)] = 0.0
    """Learning rate at the end of a schedule that falls to its end, as a share of the peak."""
    decay_steps: NonNegativeFloat = 0.2
    """Steps at the end of schedule=wsd in which the learning rate falls; a value below 1 is a share of the schedule."""
    decay_factor: Annotated[float, Field(gt=0, le=1)] = 0.7
    """Factor that schedule=step multiplies the learning rate by."""
    decay_epochs: PositiveFloat = 1.0
    """Epochs between two such multiplications."""

    def validation_errors(self) -> Iterator[str]:
        if self.warmup_steps > 1 and self.warmup_steps % 1:
            yield f"optim.warmup_steps={self.warmup_steps}: must be a whole number of steps, or below 1, a share of all"

    def decay_errors(self, schedule_steps: float) -> Iterator[str]:
        """Yield what is wrong with decay_steps, one line each; a schedule whose length is not known yet is infinite."""
        warmup, decay = self.warmup_steps, self.decay_steps
        share = sum(steps if steps < 1 else steps / schedule_steps for steps in (warmup, decay))
        if self.schedule == "wsd":
            if share > 1.000001:
                yield f"optim.warmup_steps={warmup:g} and optim.decay_steps={decay:g}: {share:.1%} of the schedule"
        elif decay != Optim().decay_steps:
            yield f"optim.decay_steps={decay:g}: is for optim.schedule=wsd, and it is {self.schedule}"


class Checkpoint(Settings):
    """Which checkpoints are kept, and which one is exported."""

    mirror: str | None = None  # room: machines
    """Folder or URL of fsspec (s3://…, hf://…) to copy checkpoints to, as run_name; null: none."""
    keep_last: PositiveInt = 2
    """Number of the newest checkpoints to keep."""
    keep_best: NonNegativeInt = 0
    """Number of further checkpoints to keep, the best by `metric`; above 0, a checkpoint follows each evaluation."""
    metric: Reopens[str] = "eval/loss"
    """Metric that ranks the evaluations for keep_best and export_best."""
    mode: Reopens[Literal["min", "max"] | None] = None
    """Whether lower or higher is better; null: lower for a loss or perplexity, else higher."""
    export_best: Reopens[bool] = False
    """Export the best checkpoint at the end instead of the last. Implies keep_best=1."""
    accept_changes: bool = False
    """Continue even if changed settings or data make this a different run from the one that was saved."""

    @property
    def num_best(self) -> int:
        """Return how many of the best checkpoints to keep."""
        return max(self.keep_best, self.export_best)


class EarlyStopping(Settings):
    """Stopping before the last step, once a metric no longer improves."""

    metric: str | None = None
    """Evaluation metric to watch, such as eval/loss; null: no early stopping."""
    mode: Literal["min", "max"] | None = None
    """Whether lower or higher is better; null: lower for a loss or perplexity, else higher."""
    patience: PositiveInt = 3
    """Evaluations in a row without an improvement after which to stop."""
    min_delta: NonNegativeFloat = 0.0
    """Change in the metric that an improvement must exceed."""

    def validation_errors(self) -> Iterator[str]:
        if self.metric is None and self != EarlyStopping():
            yield "early_stopping is off, as early_stopping.metric is null: name what to watch, such as eval/loss"
