"""Evaluation by one process alone, for --check and `python -m src.tools.evaluate`."""

from collections.abc import Iterator

import torch
from accelerate.utils import send_to_device
from torch import Tensor, nn

from src.tasks.base import Examples, Task
from src.training.batches import MicroBatch, fetch, micro_batch
from src.training.evaluation import evaluate_batches


def evaluate_alone(
    task: Task, model: nn.Module, dataset: Examples, batch_size: int, device: torch.device
) -> tuple[float, dict[str, Tensor]]:
    """Return the mean loss over the targets of the whole dataset, and by name what Task.evaluate returned for each
    example, on the CPU."""

    # slices in the dataset's order; `evaluation_batches` would need a Run, which a tool has not
    def batches() -> Iterator[MicroBatch]:
        for start in range(0, len(dataset), batch_size):
            indices = list(range(start, min(start + batch_size, len(dataset))))
            batch = micro_batch(task, fetch(task, dataset, indices), len(indices))
            yield batch._replace(data=send_to_device(batch.data, device))

    scores = evaluate_batches(task, model, batches(), device)
    # None only where a StopSignal ends it
    assert scores
    loss_sum, targets, _ = scores.totals.tolist()
    return loss_sum / max(targets, 1), {name: output.cpu() for name, output in scores.outputs.items()}
