"""A blank task, to be replaced line by line: `--task.name=blank`."""

from typing import Any

import torch
from torch import Tensor, nn

from src.tasks.base import Counts, Examples, Task


class Blank(Task):
    """Learns the sum of eight numbers: put your model, your data and your loss in place of its own."""

    name: str = "blank"
    width: int = 128
    """Outputs of the hidden layer."""

    def build_model(self) -> nn.Module:
        """Return the model, the same weights for the same seed."""
        model: Any = nn.Sequential(nn.Linear(8, self.width), nn.ReLU(), nn.Linear(self.width, 1))
        model._no_split_modules = ["Linear"]  # the blocks that FSDP shards
        return model

    def build_datasets(self) -> tuple[Examples, Examples]:
        """Return the examples to train on, and those to evaluate on: a number for each eight."""
        examples = [(x, x.sum()) for x in torch.rand(1200, 8, generator=torch.Generator().manual_seed(0))]
        return examples[200:], examples[:200]

    def count(self, batch: Any) -> Counts:
        """Return how many examples the loss of a batch sums over."""
        return {"targets": len(batch[0])}

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        """Return the loss, summed over the targets: the loop divides by their number, over all processes."""
        return nn.functional.mse_loss(model(batch[0]).float()[:, 0], batch[1], reduction="sum")
