"""What happens after a step whose gradients are not finite: all processes skip it, and too many end the run."""

import math
from pathlib import Path

from src.config import Config
from src.progress import Progress

SMALLEST_LOSS_SCALE = 2.0**-24
GROWTH_INTERVAL = 2000
"""Finite steps in a row after which the loss scale is doubled."""


def accepts(progress: Progress, grad_norm: float, is_fp16: bool) -> bool:
    """Whether to take the step. The norm over all parameters and processes decides, so that all decide the same.

    In fp16 the loss is multiplied by `progress.loss_scale`, so that small gradients survive, and by less after each
    overflow: Micikevicius et al. 2018, https://arxiv.org/abs/1710.03740. The constants are those of
    torch.amp.GradScaler, which is not used because it looks for overflows optimizer by optimizer and, where the
    optimizer is fused, keeps from Accelerate that it skipped a step.
    """
    if math.isfinite(grad_norm):
        progress.skipped_in_a_row = 0
        progress.finite_in_a_row += 1
        if is_fp16 and progress.finite_in_a_row % GROWTH_INTERVAL == 0:
            progress.loss_scale *= 2
        return True
    progress.skipped += 1
    progress.skipped_in_a_row += 1
    progress.finite_in_a_row = 0
    if is_fp16 and progress.loss_scale > SMALLEST_LOSS_SCALE:
        progress.loss_scale /= 2
        progress.skipped_in_a_row = 0  # in fp16 an overflow is no sign of trouble, while a smaller scale can help
    return False


def explain(config: Config, is_fp16: bool, newest: Path | None) -> str:
    """For the user, why the run ends.

    Args:
        newest: the last checkpoint.
    """
    advice = "use bf16" if is_fp16 else "lower optim.lr, set optim.max_grad_norm, or look for bad values in the data"
    return (
        f"{config.max_bad_steps} steps in a row had gradients that are not finite, and were skipped: {advice}; "
        f"the last checkpoint is {newest or 'none'}"
    )
