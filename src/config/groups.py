"""Groups of settings: the task, the optimizer, checkpoints and early stopping."""

from collections.abc import Iterator
from typing import Annotated, ClassVar, Literal

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt

from src.config.settings import Reopens, Settings, Values

Fraction = Annotated[float, Field(ge=0, lt=1)]


class TaskSettings(Settings):
    """Settings that every task has."""

    name: str
    """The task to train."""
    task_class: ClassVar[str] = ""
    """Import path of the Task with these settings, if they stand in a file of their own, which imports no torch."""
    metric_names: ClassVar[tuple[str, ...] | None] = None
    """Names that `Task.metrics` returns, to check settings that name a metric at the start; None: not known yet."""

    @classmethod
    def run_defaults(cls, given: Values) -> Values:
        """Return this task's own defaults of epochs, global_batch_size and optim.*, by dotted name, where they differ
        from those of other tasks. `given` has the settings that the user has given."""
        return {}


class Optim(Settings):
    """The optimizer and its learning rate."""

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
        elif decay != Optim().decay_steps:
            yield f"optim.decay_steps={decay:g}: only applies to optim.schedule=wsd, not {self.schedule}"


class Checkpoint(Settings):
    """Configures which checkpoints to keep, and which one to export."""

    keep_last: PositiveInt = 2
    """Number of newest checkpoints to keep."""
    keep_best: NonNegativeInt = 0
    """Number of best checkpoints, by `metric`, to keep as well; if above 0, save after each evaluation."""
    metric: Reopens[str] = "eval/loss"
    """Metric that ranks the evaluations for keep_best and export_best."""
    mode: Reopens[Literal["min", "max"] | None] = None
    """Whether lower or higher is better; null: lower for a loss or perplexity, else higher."""
    export_best: Reopens[bool] = False
    """Export the best checkpoint at the end instead of the last. Implies keep_best=1."""
    accept_changes: bool = False
    """Resume even if settings or data have changed so much that this is a different run."""

    @property
    def num_best(self) -> int:
        """Return the number of best checkpoints to keep."""
        return max(self.keep_best, self.export_best)


class EarlyStopping(Settings):
    """Configures when to stop before the last step, because a metric no longer improves."""

    metric: str | None = None
    """Evaluation metric to watch, such as eval/loss; null: no early stopping."""
    mode: Literal["min", "max"] | None = None
    """Whether lower or higher is better; null: lower for a loss or perplexity, else higher."""
    patience: PositiveInt = 3
    """Stop after this many consecutive evaluations without improvement."""
    min_delta: NonNegativeFloat = 0.0
    """An improvement must change the metric by more than this."""

    def validation_errors(self) -> Iterator[str]:
        if self.metric is None and self != EarlyStopping():
            yield "early_stopping needs early_stopping.metric: name the metric to watch, such as eval/loss"
