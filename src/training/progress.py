"""The progress of a run: the counters that the training loop updates and checkpoints save."""

import math
import time
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Annotated, NamedTuple, NoReturn

import torch
from accelerate import Accelerator
from pydantic import Field, PositiveFloat
from torch import Tensor

from src.config.config import Config
from src.config.errors import RunError, UserError
from src.config.groups import EarlyStopping
from src.distributed.accelerator import sum_dtype
from src.tasks.base import Counts, Metrics
from src.training.score import score

SMALLEST_LOSS_SCALE = 2.0**-24
"""The initial loss scale, halved 40 times. At this scale an overflow counts as a bad step."""
GROWTH_INTERVAL = 2000
"""Consecutive finite steps after which the loss scale is doubled."""
LIMITS = Field(ge=0, lt=2**63)
"""Of numbers in state.json, which strangers may have written: JSON has larger ones, which no float can hold."""
Count = Annotated[int, LIMITS]
Seconds = Annotated[float, LIMITS]
Evaluations = dict[Count, dict[str, Count | float]]
"""Each evaluation's metrics, by the step that it followed."""


class StepResult(NamedTuple):
    """The results of one optimizer step."""

    counts: Counts
    """The step's counts over all processes, known before it began."""
    lr: float
    losses: list[Tensor]
    """Loss of each micro-batch, summed over this process's targets; shape (). As many on all processes."""
    norm: Tensor
    """L2 norm of the gradients over all processes, before clipping; shape (), float64."""
    measured: dict[str, float] = {}
    """What else was measured in the interval that ends with this step, by the names to log."""

    @property
    def finite_norm(self) -> float | None:
        """Return the norm, or None if it is non-finite and the step was skipped. Wait for the device."""
        norm = self.norm.item()
        return norm if math.isfinite(norm) else None


def added(counts: Counts, more: Counts) -> Counts:
    """Return the sums of two sets of counts, name by name."""
    return counts | {name: counts.get(name, 0.0) + number for name, number in more.items()}


def loss_sums(accelerator: Accelerator, results: list[StepResult]) -> list[float]:
    """Return each step's loss, summed over all processes; at least one step. Wait for the device. Collective."""
    # one all-reduce for all steps since the last one: the sums are not needed earlier, and each would stall its step
    losses = torch.stack([loss for result in results for loss in result.losses])
    summed = iter(accelerator.reduce(losses.to(sum_dtype(losses.device)), "sum").tolist())
    return [sum(islice(summed, len(result.losses))) for result in results]


def mean_loss(accelerator: Accelerator, result: StepResult) -> float:
    """Return a step's loss: the mean over its targets on all processes. Collective."""
    (loss_sum,) = loss_sums(accelerator, [result])
    return loss_sum / max(result.counts["targets"], 1)


@dataclass
class Progress:
    """The counters of a run. Logging intervals end with each step that is a multiple of log_every."""

    # Every field is saved in state.json, which preserves floats bit for bit. So are the unfinished interval's sums:
    # without them, the first line logged after a resume would differ from an uninterrupted run's.

    step: Count = 0
    """Optimizer steps taken, skipped ones included. With the seed, it determines which examples come next."""
    skipped: Count = 0
    """Steps that were skipped because their gradients were non-finite."""
    skipped_in_a_row: Count = 0
    loss_scale: PositiveFloat = 2.0**16
    """Factor that the loss is multiplied by in fp16; 1.0 in other precisions."""
    finite_in_a_row: Count = 0
    """Steps since the last non-finite one."""
    interval_start: Count = 0
    """The last step before this interval."""
    interval_loss: float = 0.0
    """Sum of the loss in this interval, over the targets of all processes."""
    interval_targets: float = 0.0
    interval_counts: Counts = field(default_factory=dict)
    """Counts in this interval over all processes, including steps with a non-finite loss."""
    interval_seconds: Seconds = 0.0
    """Time in this interval, without evaluations."""
    training_seconds: Seconds = 0.0
    """Time before this interval, without evaluations."""
    seconds: Seconds = 0.0
    """Time since the first step, with evaluations, but without the time in which the run was stopped."""
    counted: Counts = field(default_factory=dict)
    """Counts before this interval."""
    train_loss: float | None = None
    """The last logged training loss; None if no step in that interval had a finite one."""
    evaluations: Evaluations = field(default_factory=dict)
    best: float | None = None
    """The best score so far, for early stopping."""
    evaluations_without_gain: Count = 0

    def __post_init__(self) -> None:
        self.evaluations = {**self.evaluations}  # a copy, which a later evaluation does not change
        # not a field, so not saved: these have been read wherever a checkpoint is due (Run.needs_sync)
        self._unread: list[StepResult] = []
        self.start_clock()

    @property
    def last_evaluated(self) -> int:
        """Return the step that the last evaluation followed; 0: none yet."""
        # the last key: dicts and JSON both keep the order
        return next(reversed(self.evaluations), 0)

    @property
    def evaluation(self) -> Metrics:
        """Return the last evaluation's metrics; empty: none yet."""
        return self.evaluations.get(self.last_evaluated, {})

    def all_counts(self) -> Counts:
        """Return the counts since the first step."""
        return added(self.counted, self.interval_counts)

    def start_clock(self) -> None:
        """Start the clock, before the first step of a session."""
        self._clock = time.perf_counter()

    def tick(self, is_training: bool = True) -> None:
        """Add the time since the last tick to the time spent training, or only to the total."""
        passed = time.perf_counter() - self._clock
        self._clock += passed
        self.seconds += passed
        if is_training:
            self.interval_seconds += passed

    def add_step(self, result: StepResult) -> None:
        """Keep a step's results until `read_steps`."""
        # still on the device: .item() would leave it idle while the host prepares the next step
        self._unread.append(result)

    def read_steps(self, accelerator: Accelerator, is_fp16: bool, max_bad_steps: int) -> bool:
        """Count the steps added since the last call, at least one. Return whether `max_bad_steps` consecutive steps
        were non-finite. Wait for the device. Collective."""
        results, self._unread = self._unread, []
        sums = loss_sums(accelerator, results)
        # one transfer for all of them; no collective, as all processes have the same norms
        norms = torch.stack([result.norm for result in results]).tolist()
        for result, loss_sum, grad_norm in zip(results, sums, norms, strict=True):
            self.interval_counts = added(self.interval_counts, result.counts)
            # a single NaN would make the whole interval's mean NaN
            if math.isfinite(loss_sum):
                self.interval_loss += loss_sum
                self.interval_targets += result.counts["targets"]
            self.update_loss_scale(grad_norm, is_fp16)
            if self.skipped_in_a_row >= max_bad_steps:
                return True
        return False

    def update_loss_scale(self, grad_norm: float, is_fp16: bool) -> None:
        """Update the loss scale, and count whether the step was taken: the global norm decides, so all processes agree.

        In fp16 the loss is multiplied by `loss_scale`, so that small gradients don't underflow, and the scale is halved
        after each overflow: Micikevicius et al. 2018, https://arxiv.org/abs/1710.03740. The constants are those of
        torch.amp.GradScaler.
        """
        # The norm replaces GradScaler's search for overflows: it is known anyway, and it covers all processes and all
        # optimizers, which must skip a step together.
        if math.isfinite(grad_norm):
            self.skipped_in_a_row = 0
            self.finite_in_a_row += 1
            # try a larger scale again: one early overflow should not make small gradients underflow for good
            if is_fp16 and self.finite_in_a_row % GROWTH_INTERVAL == 0:
                self.loss_scale *= 2
            return
        self.skipped += 1
        self.skipped_in_a_row += 1
        self.finite_in_a_row = 0
        if is_fp16 and self.loss_scale > SMALLEST_LOSS_SCALE:
            self.loss_scale /= 2
            # an overflow is harmless as long as a smaller scale can help
            self.skipped_in_a_row = 0

    def give_up(self, config: Config, is_fp16: bool, newest: Path | None) -> NoReturn:
        """Raise a RunError that explains why the run gives up. `newest` is the last checkpoint."""
        advice = "lower optim.lr, set optim.max_grad_norm, or look for bad values in the data"
        if is_fp16:
            advice = "use bf16"
        raise RunError(
            f"{config.max_bad_steps} consecutive steps had non-finite gradients and were skipped: {advice}; "
            f"the last checkpoint is {newest or 'none'}"
        )

    def training_metrics(self, num_examples: int, is_fp16: bool) -> dict[str, float | None]:
        """Return the means over this interval, in which all processes together had `num_examples`, and the counts so
        far."""
        # a mean over targets, as in each step: a mean of the steps' means would give a small last batch too much weight
        metrics = {
            "train/loss": self.interval_loss / self.interval_targets if self.interval_targets else None,
            "perf/samples_per_second": num_examples / self.interval_seconds,
        }
        if tokens := self.interval_counts.get("tokens"):
            metrics["perf/tokens_per_second"] = tokens / self.interval_seconds
        if padded := self.interval_counts.get("padded_tokens"):
            metrics["perf/padding"] = 1 - self.interval_counts["tokens"] / padded
        metrics |= {name: number for name, number in self.all_counts().items() if "/" in name}
        if is_fp16:
            metrics["train/loss_scale"] = self.loss_scale
        if self.skipped or is_fp16:
            metrics["train/skipped_steps"] = self.skipped
        return metrics

    def end_interval(self) -> None:
        """Start the next interval."""
        self.interval_start = self.step
        self.training_seconds += self.interval_seconds
        self.interval_seconds = self.interval_loss = self.interval_targets = 0.0
        self.counted = self.all_counts()
        self.interval_counts = {}

    def add_evaluation(self, results: Metrics, settings: EarlyStopping) -> None:
        """Keep the metrics of an evaluation after this step, and count the evaluations without improvement."""
        self.evaluations[self.step] = results
        metric = settings.metric or ""  # empty: no early stopping
        if metric in results:
            now = score(results[metric], metric, settings.mode)
            self.evaluations_without_gain += 1
            if self.best is None or now > self.best + settings.min_delta:
                self.best = now
                self.evaluations_without_gain = 0

    def metric_error(self, config: Config) -> UserError | None:
        """Return an error about a metric that the settings name but the evaluation after this step lacks; None: all are
        there, or there was no evaluation."""
        # known only now if the task doesn't declare its metrics (Task.metric_names)
        missing = config.metric_errors(self.evaluation) if self.step in self.evaluations else []
        advice = f"choose another one, and the same command resumes at step {self.step}"
        return UserError(f"{missing[0]}; {advice}") if missing else None

    def is_out_of_patience(self, settings: EarlyStopping) -> bool:
        """Return whether early stopping ends the run: the same on all processes, and after a resume."""
        return settings.metric is not None and self.evaluations_without_gain >= settings.patience

    def end_note(self, settings: EarlyStopping) -> str:
        """Return which setting makes a finished run longer."""
        if not self.is_out_of_patience(settings):
            return "to train longer, raise --epochs or --max_steps"
        stale = f"{settings.metric} has not improved in {self.evaluations_without_gain} evaluations"
        return f"ended by early stopping, as {stale}; to train longer, raise --early_stopping.patience"
