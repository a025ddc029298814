"""Groups of settings: the task, the optimizer, checkpoints and early stopping."""

from collections.abc import Iterator
from typing import ClassVar, Literal

from pydantic import NonNegativeFloat, NonNegativeInt, PositiveInt

from src.config.muon import MuonSettings
from src.config.optim import OptimSettings
from src.config.rates import RateSettings
from src.config.settings import Reopens, Settings, Values


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


class Optim(
    MuonSettings,
    RateSettings,
    OptimSettings,
):
    """The optimizer and its learning rate."""


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
