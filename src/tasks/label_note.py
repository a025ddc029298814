"""A note on a loss that sums over more labels than the task counts targets."""

import math
from typing import Any

import torch
from torch import Tensor

from src.config.terminal import is_first, say

SUMS = "Sum", "Add", "View", "ToCopy", "Mul"
"""Operations, as autograd names them, whose result is a weighted sum of what they are given."""
SAID: set[str] = set()
"""Tasks whose labels have been remarked upon."""


def note_labels(name: str, loss: Tensor, targets: float) -> None:
    """Say once if the loss of the task of this name is a sum, by one of torch's losses, over more labels than
    Task.count counts targets."""
    labels = summed_labels(loss.grad_fn)
    if labels > 1.01 * targets and is_first() and name not in SAID:
        SAID.add(name)
        say(
            f"NOTE: {name}.loss sums over {labels:,.0f} labels where {name}.count counts {targets:,.0f} targets, so "
            f"the logged loss ({loss / targets:,.4g}) and the gradients are {labels / targets:,.4g} times those of a "
            "mean over labels. If a loss per example is meant, all is well; if each label is a target, count them all"
        )


def summed_labels(node: Any, depth: int = 8) -> float:
    """Return over how many labels a result of autograd, `node`, sums one of torch's losses: weighted as they are, and
    the most if it sums several. Look back at `depth` operations, as the paths through them may double with each."""
    # autograd stores 1 for a mean
    if getattr(node, "_saved_reduction", 1) != 1:
        return (node._saved_target != getattr(node, "_saved_ignore_index", math.nan)).sum().item()
    factor = getattr(node, "_saved_other", 1.0)
    if not depth or not node or not node.name().startswith(SUMS) or factor is None:
        return 0
    weight = torch.as_tensor(factor).float().mean().item()  # of a mask: how many of the labels it keeps
    return weight * max(summed_labels(before, depth - 1) for before, _ in node.next_functions)
