"""How far a run has got: what the loop counts, and what each checkpoint keeps of it."""

import math
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple, NoReturn

import torch
from accelerate import Accelerator
from torch import Tensor

from src.config.config import Config, metric_errors
from src.config.errors import RunError, UserError
from src.config.groups import EarlyStopping
from src.tasks.base import Counts, Metrics
from src.training.score import score

SMALLEST_LOSS_SCALE = 2.0**-24
"""The first loss scale, halved 40 times: from there on an overflow counts as a bad step."""
GROWTH_INTERVAL = 2000
"""Finite steps in a row after which the loss scale is doubled."""
Evaluations = dict[int, Metrics]
"""Results of each evaluation by name, by the step it came after."""


class StepResult(NamedTuple):
    """What one optimizer step reports."""

    counts: Counts
    """What was counted in it, over all processes, known before it began."""
    lr: float
    loss_sum: Tensor
    """The loss summed over the targets of this process; shape (), float64."""
    norm: Tensor
    """The L2 norm of the gradients over all processes, before clipping; shape (), float64."""

    @property
    def grad_norm(self) -> float | None:
        """Return the norm, or None if it is not finite, and the step was skipped. Wait for the device."""
        norm = self.norm.item()
        return norm if math.isfinite(norm) else None


def added(counts: Counts, more: Counts) -> Counts:
    """Return the sums of both, name by name."""
    return {**counts, **{name: counts.get(name, 0.0) + number for name, number in more.items()}}


def loss_sums(accelerator: Accelerator, results: list[StepResult]) -> list[float]:
    """Return the loss sum over all processes of each step, at least one. Wait for the device. Collective."""
    # one exchange for all steps since the last one: nobody needs the sums before, and each would hold its step up
    sums = torch.stack([result.loss_sum for result in results])
    return accelerator.reduce(sums, "sum").tolist()


def mean_loss(accelerator: Accelerator, result: StepResult) -> float:
    """Return a step's loss, the mean over its targets on all processes. Collective."""
    (loss_sum,) = loss_sums(accelerator, [result])
    return loss_sum / max(result.counts["targets"], 1)


@dataclass
class Progress:
    """The counters of a run. An interval begins after a step that is a multiple of log_every and ends with the next."""

    # Every field is in state.json, in which a Python float comes back to the last bit. So are the unfinished interval's
    # sums: without them, the first record after a resume would differ from that of a run that was never stopped.

    step: int = 0
    """Optimizer steps done, skipped ones included. With the seed, it says which examples come next."""
    skipped: int = 0
    """Steps that were skipped because a gradient was not finite."""
    skipped_in_a_row: int = 0
    loss_scale: float = 2.0**16
    """Factor that the loss is multiplied by in fp16; 1.0 in other precisions."""
    finite_in_a_row: int = 0
    """Steps since the last one that was not finite."""
    interval_start: int = 0
    """The step that this interval began after."""
    interval_loss: float = 0.0
    """The loss in this interval, summed over the targets of all processes."""
    interval_targets: float = 0.0
    interval_counts: Counts = field(default_factory=dict)
    """What was counted in this interval, over all processes, in steps without a finite loss too."""
    interval_seconds: float = 0.0
    """Time in this interval, evaluations excluded."""
    training_seconds: float = 0.0
    """Time before this interval, evaluations excluded."""
    seconds: float = 0.0
    """Time since the first step, evaluations included, the time between two sessions of a run excluded."""
    counted: Counts = field(default_factory=dict)
    """What was counted before this interval."""
    train_loss: float | None = None
    """The loss in the last training record; None: no step in it had a finite one."""
    evaluations: Evaluations = field(default_factory=dict)
    best: float | None = None
    """The score that early stopping compares with."""
    evaluations_without_gain: int = 0

    def __post_init__(self) -> None:
        # JSON's keys are text
        self.evaluations = {int(step): results for step, results in self.evaluations.items()}
        # not a field, so not saved: wherever a checkpoint is due, these have been read (Run.is_read_due)
        self._unread: list[StepResult] = []
        self.start_clock()

    @property
    def last_evaluated(self) -> int:
        """Return the step that the last evaluation came after; 0: none yet."""
        # the last key, as dicts and JSON both keep the order
        return next(reversed(self.evaluations), 0)

    @property
    def evaluation(self) -> Metrics:
        """Return the results of the last evaluation; empty: none yet."""
        return self.evaluations.get(self.last_evaluated, {})

    def all_counts(self) -> Counts:
        """Return what was counted since the first step."""
        return added(self.counted, self.interval_counts)

    def start_clock(self) -> None:
        """Begin to count time, before the first step of a session."""
        self._clock = time.perf_counter()

    def tick(self, is_training: bool = True) -> None:
        """Count the time since the last tick, as training or as evaluation."""
        now = time.perf_counter()
        self.seconds += now - self._clock
        if is_training:
            self.interval_seconds += now - self._clock
        self._clock = now

    def add_step(self, result: StepResult) -> None:
        """Keep what a step reports until `read_steps`."""
        # still on the device: .item() here would make it idle while the host prepares the next step
        self._unread.append(result)

    def read_steps(self, accelerator: Accelerator, is_fp16: bool, max_bad_steps: int) -> bool:
        """Count the steps that were added since the last call. Wait for the device. Collective.

        Returns:
            Whether `max_bad_steps` steps in a row were bad.
        """
        if not self._unread:
            return False
        results, self._unread = self._unread, []
        sums = loss_sums(accelerator, results)
        # one transfer for all of them, as each would wait for the device; no exchange: norms are alike on all processes
        norms = torch.stack([result.norm for result in results]).tolist()
        for result, loss_sum, grad_norm in zip(results, sums, norms, strict=True):
            self.interval_counts = added(self.interval_counts, result.counts)
            # one NaN would make the mean of the whole interval NaN
            if math.isfinite(loss_sum):
                self.interval_loss += loss_sum
                self.interval_targets += result.counts["targets"]
            self.update_loss_scale(grad_norm, is_fp16)
            if self.skipped_in_a_row >= max_bad_steps:
                return True
        return False

    def update_loss_scale(self, grad_norm: float, is_fp16: bool) -> bool:
        """Update the loss scale. Return whether the step was taken: the global norm decides, alike on all processes.

        In fp16 the loss is multiplied by `loss_scale`, halved after each overflow, so that small gradients survive:
        Micikevicius et al. 2018, https://arxiv.org/abs/1710.03740. The constants are those of torch.amp.GradScaler.
        """
        # The norm instead of GradScaler's search for overflows: it is known anyway, covers all processes and, unlike
        # that search, all optimizers. They must skip a step together.
        if math.isfinite(grad_norm):
            self.skipped_in_a_row = 0
            self.finite_in_a_row += 1
            # one early overflow shouldn't keep small gradients at 0 for the rest of the run: try a larger scale again
            if is_fp16 and self.finite_in_a_row % GROWTH_INTERVAL == 0:
                self.loss_scale *= 2
            return True
        self.skipped += 1
        self.skipped_in_a_row += 1
        self.finite_in_a_row = 0
        if is_fp16 and self.loss_scale > SMALLEST_LOSS_SCALE:
            self.loss_scale /= 2
            # an overflow is no sign of trouble as long as a smaller scale can help
            self.skipped_in_a_row = 0
        return False

    def give_up(self, config: Config, is_fp16: bool, newest: Path | None) -> NoReturn:
        """Raise a RunError that says why bad steps end the run. `newest` is the last checkpoint."""
        fault = f"{config.max_bad_steps} steps in a row had gradients that are not finite, and were skipped"
        advice = "lower optim.lr, set optim.max_grad_norm or look for bad values in the data"
        if is_fp16:
            advice = "use bf16"
        raise RunError(f"{fault}: {advice}; the last checkpoint is {newest or 'none'}")

    def training_metrics(self, num_examples: int, is_fp16: bool) -> dict[str, float | None]:
        """Return means over the interval, in which all processes had `num_examples`, and the steps skipped so far."""
        # a mean over targets, as in each step: a mean of the steps' means would overrate a small last batch
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
        """Begin the next interval."""
        self.interval_start = self.step
        self.training_seconds += self.interval_seconds
        self.interval_seconds = 0.0
        self.interval_loss = 0.0
        self.interval_targets = 0.0
        self.counted = self.all_counts()
        self.interval_counts = {}

    def add_evaluation(self, results: Metrics, settings: EarlyStopping) -> None:
        """Keep the results of an evaluation after this step."""
        self.evaluations[self.step] = results
        self._count_improvement(results, settings)

    def _count_improvement(self, results: Metrics, settings: EarlyStopping) -> None:
        """Count for how many evaluations the watched metric has not improved."""
        if settings.metric is None or settings.metric not in results:
            return
        now = score(results[settings.metric], settings.metric, settings.mode)
        self.evaluations_without_gain += 1
        if self.best is None or now > self.best + settings.min_delta:
            self.best = now
            self.evaluations_without_gain = 0

    def missing_metrics(self, config: Config) -> list[str]:
        """Return an error line for each metric that the settings name, but the evaluation after this step lacks."""
        # told only now for tasks that don't declare their metrics (Task.metric_names)
        return metric_errors(config, self.evaluation) if self.step in self.evaluations else []

    def refuse(self, missing_metrics: list[str]) -> NoReturn:
        """Raise a UserError that says which metric the evaluation lacks."""
        raise UserError(f"{missing_metrics[0]}; with another one, the same command continues from step {self.step}")

    def is_out_of_patience(self, settings: EarlyStopping) -> bool:
        """Return whether to end the run: the same on all processes, and after a resume."""
        return settings.metric is not None and self.evaluations_without_gain >= settings.patience
