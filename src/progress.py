"""How far a run has come: what the loop counts, and what each checkpoint keeps of it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from src.sums import Sums


class Step(NamedTuple):
    """What one optimizer step has to say."""

    sums: Sums
    lr: float
    grad_norm: float | None
    """Before it was clipped; None: it is not finite, and the step was not taken."""

    @property
    def loss(self) -> float:
        """The mean over what it counts."""
        return self.sums.loss / max(self.sums.counted, 1)


@dataclass
class Progress:
    """Saved as JSON, which gives each float back to the last bit.

    An interval is what comes after a step that is a multiple of log_every, up to the next.
    """

    step: int = 0
    """Optimizer steps done, the skipped ones among them. With the seed, it says which examples come next."""
    skipped: int = 0
    """Steps that were not taken, as a gradient was not finite."""
    skipped_in_a_row: int = 0
    loss_scale: float = 2.0**16
    """What the loss is multiplied by in fp16; 1.0 in other precisions."""
    finite_in_a_row: int = 0
    """Steps since the loss scale last changed."""
    interval: list[float] = field(default_factory=lambda: [0.0] * 4)
    """Loss sum, count, tokens without and with padding, over all processes, in this interval."""
    interval_seconds: float = 0.0
    """Time since its beginning, without evaluations."""
    training_seconds: float = 0.0
    """Time from the first step to its beginning, without evaluations."""
    seconds: float = 0.0
    """Time since the first step, evaluations included, the time between two sessions of a run not."""
    tokens: float = 0.0
    """Without padding, up to its beginning."""
    train_loss: float | None = None
    """Of the last training record; None: none of its steps had a finite one."""
    evaluated: int = 0
    """The step after which the last evaluation was; 0: none yet."""
    evaluation: dict[str, float] = field(default_factory=dict)
    """Its results, by name."""
    best: float | None = None
    """What early stopping compares with."""
    evaluations_without_gain: int = 0

    @property
    def updates(self) -> int:
        """Steps that were taken: what the learning rate's schedule counts."""
        return self.step - self.skipped

    def count(self, sums: Sums) -> None:
        """Adds a step to the interval."""
        self.interval = [total + amount for total, amount in zip(self.interval, sums[:4], strict=True)]

    def metrics(self, examples: int, is_fp16: bool) -> dict[str, float | None]:
        """The means over the interval, and what was skipped so far.

        Args:
            examples: in the interval.
        """
        loss_sum, count, tokens, padded = self.interval
        metrics = {
            "train/loss": loss_sum / count if count else None,
            "perf/samples_per_second": examples / self.interval_seconds,
        }
        if tokens:
            metrics["perf/tokens_per_second"] = tokens / self.interval_seconds
            metrics["perf/padding"] = 1 - tokens / padded
        if is_fp16:
            metrics["train/loss_scale"] = self.loss_scale
        if self.skipped or is_fp16:
            metrics["train/skipped_steps"] = self.skipped
        return metrics

    def end_interval(self) -> None:
        """Begins the next one."""
        self.training_seconds += self.interval_seconds
        self.tokens += self.interval[2]
        self.interval, self.interval_seconds = [0.0] * 4, 0.0
