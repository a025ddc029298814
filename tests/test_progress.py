"""Which steps are skipped, and how the loss scale of fp16 follows."""

import math
from dataclasses import asdict
from types import SimpleNamespace
from typing import Any

import torch

from src.training.progress import Progress, StepResult

ALONE: Any = SimpleNamespace(reduce=lambda tensor, _: tensor)
"""What read_steps needs of the Accelerator of a single process."""


def test_the_loss_scale_halves_at_an_overflow_and_doubles_after_many_good_steps() -> None:
    progress = Progress()
    norms = (3.0, math.inf, math.nan, 3.0)
    assert [progress.update_loss_scale(norm, is_fp16=True) for norm in norms] == [True, False, False, True]
    assert (progress.loss_scale, progress.skipped) == (2.0**14, 2)
    assert all(progress.update_loss_scale(3.0, is_fp16=True) for _ in range(1998))
    assert progress.loss_scale == 2.0**14
    assert progress.update_loss_scale(3.0, is_fp16=True)
    assert progress.loss_scale == 2.0**15


def test_in_fp16_only_what_the_smallest_scale_does_not_help_counts_as_bad() -> None:
    progress = Progress()
    assert not any(progress.update_loss_scale(math.nan, is_fp16=True) for _ in range(40))
    assert (progress.loss_scale, progress.skipped_in_a_row) == (2.0**-24, 0)
    assert not any(progress.update_loss_scale(math.nan, is_fp16=True) for _ in range(3))
    assert (progress.loss_scale, progress.skipped_in_a_row) == (2.0**-24, 3)


def step(loss_sum: float, norm: float) -> StepResult:
    counts = {"targets": 4.0, "tokens": 10.0, "padded_tokens": 16.0}
    return StepResult(counts, 1e-3, *(torch.tensor(number, dtype=torch.float64) for number in (loss_sum, norm)))


def test_steps_are_counted_in_their_order_whenever_they_are_read() -> None:
    steps = [step(1.5, 1.0), step(math.nan, math.nan), step(0.25, math.inf), step(1e-9, 2.0)]
    each, together = Progress(loss_scale=1.0), Progress(loss_scale=1.0)
    for result in steps:
        each.add_step(result)
        assert not each.read_steps(ALONE, is_fp16=False, max_bad_steps=3)
        together.add_step(result)
    assert not together.read_steps(ALONE, is_fp16=False, max_bad_steps=3)
    assert asdict(each) == asdict(together)
    assert together.interval_loss == 1.5 + 0.25 + 1e-9
    assert together.interval_targets == 12
    assert together.interval_counts == {"targets": 16, "tokens": 40, "padded_tokens": 64}
    assert (together.loss_scale, together.skipped, together.skipped_in_a_row) == (1.0, 2, 0)
    for result in steps:
        together.add_step(result)
    assert together.read_steps(ALONE, is_fp16=False, max_bad_steps=2), "found, though a good one has followed"
