"""What a task's methods return is looked at: one line says what they must return."""

import contextlib
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn.functional import cross_entropy, mse_loss
from torch.utils.data import IterableDataset, TensorDataset

from src.config.errors import UserError
from src.tasks.mnist import Mnist
from src.tasks.task_checks import require_right, require_sum


class Stream(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        yield from range(4)

    def __len__(self) -> int:
        return 4


LOSS = torch.tensor(3.0)
ROWS = torch.zeros(4)
DATASET = TensorDataset(ROWS)
SUM = "the loss summed over its targets, not their mean, as a tensor of shape ()"
WRONG: dict[str, list[Any]] = {
    "build_datasets": [DATASET, (DATASET, Stream()), (DATASET,) * 3],
    "loss": [3.0, ROWS, (LOSS,)],
    "evaluate": [LOSS, (LOSS, ROWS), (LOSS, {"a": LOSS}), (3.0, {})],
    "metrics": [{"accuracy": "good"}, {"accuracy": LOSS}, {"accuracy": None}, 0.5],
}
RIGHT: dict[str, list[Any]] = {
    "build_datasets": [[DATASET, [2, 3]]],
    "loss": [LOSS],
    "evaluate": [(LOSS, {}), [LOSS, {"a": ROWS, "b": torch.zeros(4, 2)}]],
    "metrics": [{}, {"accuracy": 1, "other": np.float64(0.5)}],
}
MUST_RETURN = {
    "build_datasets": "two map-style datasets, to train and to evaluate on, each with a length and an index",
    "loss": SUM,
    "evaluate": f"two values: {SUM}, and tensors of shape (examples, ...) by name",
    "metrics": "numbers by name, which float() makes of a tensor",
}


@pytest.mark.parametrize("method", list(MUST_RETURN))
def test_a_method_that_returns_something_else_is_named(method: str) -> None:
    for value in WRONG[method]:
        with pytest.raises(UserError) as error:
            require_right(Mnist(), method, value)
        assert str(error.value) == f"Mnist.{method} must return {MUST_RETURN[method]}"
    for value in RIGHT[method]:
        require_right(Mnist(), method, value)


def test_a_mean_is_refused_where_autograd_tells(monkeypatch: pytest.MonkeyPatch) -> None:
    """And nothing that may be a sum: a mean of one target, times their number, or beside something else."""
    logits, labels = torch.randn(4, 3, requires_grad=True), torch.tensor([0, 1, 2, 0])
    mean = cross_entropy(logits, labels)
    squares = mse_loss(logits, logits.detach() + 1)
    for loss, targets, is_sum in (
        (mean, 4, False), (squares, 12, False), (mean, 1, True), (mean * 4, 4, True),
        (cross_entropy(logits, labels, reduction="sum"), 4, True), (mean + logits.square().sum(), 4, True),
    ):  # fmt: skip
        monkeypatch.setattr(Mnist, "count", lambda *_, number=targets: {"targets": number})
        with contextlib.nullcontext() if is_sum else pytest.raises(UserError, match="must return the loss summed"):
            require_sum(Mnist(), loss, None)
