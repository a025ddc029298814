"""Which steps are skipped, and how the loss scale of fp16 follows."""

import math

from src.progress import Progress


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


def test_without_fp16_nothing_is_scaled_and_bad_steps_in_a_row_are_counted() -> None:
    progress = Progress(loss_scale=1.0)
    norms = (math.nan, 1.0, math.inf, -math.inf)
    assert [progress.update_loss_scale(norm, is_fp16=False) for norm in norms] == [False, True, False, False]
    assert (progress.loss_scale, progress.skipped, progress.skipped_in_a_row) == (1.0, 3, 2)
