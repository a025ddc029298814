"""Checks on what a task's methods return: one line for a user whose method returns the wrong thing.

The loss is checked in a run's first step alone, so that later steps cost nothing.
"""

from collections.abc import Callable
from typing import Any

from accelerate.utils import send_to_device
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import IterableDataset

from src.config.errors import UserError, listed
from src.tasks.base import Task
from src.tasks.label_note import note_labels

SUM = "the loss summed over its targets, not their mean, as a tensor of shape ()"
MUST_RETURN = {
    "build_datasets": "two map-style datasets, to train on and to evaluate on, each with a length and indexing",
    "loss": SUM,
    "evaluate": f"two values: {SUM}, and tensors of shape (examples, ...) by name",
    "metrics": "numbers by name; convert a tensor with float()",
}
MEAN = 1
"""The `reduction` of a mean, as autograd stores it."""
LOSS_REMARKS: list[Callable[[str, Tensor, float], None]] = [
    # functions that remark on a loss in the first step: called with the task's name, the loss and its targets
    note_labels,
]


def require_right(task: Task, method: str, found: Any) -> None:
    """Raise a UserError if the method returned the wrong thing."""
    is_right = False
    match method, found:
        case "build_datasets", [_, _]:
            is_right = all(hasattr(data, "__len__") and not isinstance(data, IterableDataset) for data in found)
        case "loss", Tensor(shape=[]):
            is_right = True
        case "evaluate", [Tensor(shape=[]), dict(outputs)]:
            is_right = all(isinstance(output, Tensor) and output.ndim for output in outputs.values())
        case "metrics", dict(metrics):
            is_right = all(isinstance(value, int | float) for value in metrics.values())
    if not is_right:
        raise UserError(f"{type(task).__name__}.{method} must return {MUST_RETURN[method]}")


def require_sum(task: Task, loss: Tensor, batch: Any) -> None:
    """Raise a UserError if a batch's loss is not a tensor of shape (), or is a mean over several targets by one of
    torch's losses. Autograd reveals this, so nothing has to be computed."""
    require_right(task, "loss", loss)
    name, targets = type(task).__name__, max(1.0, task.count(send_to_device(batch, "cpu"))["targets"])
    if getattr(loss.grad_fn, "_saved_reduction", None) == MEAN and targets > 1:
        raise UserError(f"{name}.loss must return {SUM}")
    for remark in LOSS_REMARKS:
        remark(name, loss, targets)


def require_gradients(model: Any, step: int) -> None:
    """Raise a UserError if DDP got no gradient for a parameter in the first step, `step` 0: it has not reduced the
    others of its bucket either, and would fail in the second step. Elsewhere such a parameter does no harm."""
    if step == 0 and isinstance(model, DistributedDataParallel):
        unused = [name for name, p in model.module.named_parameters() if p.requires_grad and p.grad is None]
        if unused:
            raise UserError(
                f"DDP needs a gradient of each trained parameter, but the loss does not depend on {listed(unused)}: "
                "remove them, or set their requires_grad to False"
            )
