"""Evaluation: the one loop over batches that training, --check and the tools share, and its results in order."""

import math
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import torch
from accelerate import Accelerator
from accelerate.utils import send_to_device
from torch import Tensor, nn

from src.distributed.stop import StopSignal
from src.tasks.base import Examples, Table, Task
from src.tasks.returned import returned
from src.training.batches import MicroBatch, fetch, micro_batch
from src.training.gradients import float64_zeros


class Evaluation(NamedTuple):
    """What one evaluation found."""

    metrics: dict[str, float]
    """Values by name, eval/…."""
    report: dict[str, Table]
    """What Task.report returned."""
    outputs: dict[str, Tensor]
    """What Task.tables makes more tables from."""


class Scores(NamedTuple):
    """What the evaluation of some batches gives."""

    totals: Tensor
    """The loss summed, its targets and the examples; shape (3,), float64, on the device."""
    outputs: dict[str, Tensor]
    """What Task.evaluate returned of each example, by name; shape (examples, ...)."""


@torch.no_grad()
def evaluate_batches(
    task: Task, model: nn.Module, batches: Iterable[MicroBatch], device: torch.device, stop: StopSignal | None = None
) -> Scores | None:
    """Return the scores of this process's batches; None if told to stop meanwhile."""
    totals = float64_zeros(3, device)
    loss_sum, targets, examples = totals.unbind()  # views: what is added to them is added to `totals`
    outputs: dict[str, list[Tensor]] = {}
    for batch in batches:
        if stop and stop.poll():
            return None
        loss, batch_outputs = returned(task, "evaluate", model, batch.data)
        # a dummy batch, of weight 0, is only there because FSDP's forward is collective
        loss_sum += loss * batch.weight
        targets += batch.counts.targets * batch.weight
        examples += batch.num_examples
        for name, output in batch_outputs.items():
            outputs.setdefault(name, []).append(output[: batch.num_examples])
    return Scores(totals, {name: torch.cat(of_batches) for name, of_batches in outputs.items()})


def evaluate_alone(
    task: Task, model: nn.Module, dataset: Examples, batch_size: int, device: torch.device
) -> tuple[float, dict[str, Tensor]]:
    """Return the mean loss over the targets of the dataset, all of it in this process, and what Task.evaluate returned
    of each example by name, on the CPU."""

    def batches() -> Iterator[MicroBatch]:
        for start in range(0, len(dataset), batch_size):
            indices = list(range(start, min(start + batch_size, len(dataset))))
            batch = micro_batch(task, fetch(task, dataset, indices), len(indices))
            yield batch._replace(data=send_to_device(batch.data, device))

    scores = evaluate_batches(task, model, batches(), device)
    assert scores  # as nobody asks it to stop
    loss_sum, targets, _ = scores.totals.tolist()
    return loss_sum / max(targets, 1), {name: output.cpu() for name, output in scores.outputs.items()}


def gather_in_order(accelerator: Accelerator, outputs: Tensor, num_examples: int) -> Tensor:
    """Return per-example outputs of all processes, in the order of the dataset, on the CPU. Collective.

    Args:
        outputs: those of this process's `evaluation_batches`; shape (share, ...).
        num_examples: of the dataset: the length of what is returned.
    """
    world_size = accelerator.num_processes
    largest_share = math.ceil(num_examples / world_size)
    # a gather takes equal sizes; shares are every world_size-th example, so that one is missing at most
    missing = outputs.new_zeros(largest_share - len(outputs), *outputs.shape[1:])
    padded = torch.cat([outputs, missing])
    gathered = accelerator.gather(padded).view(world_size, *padded.shape)
    # the first example of each process, then the second, …: the order of the dataset, with the padding last
    in_order = gathered.transpose(0, 1).flatten(0, 1)
    return in_order[:num_examples].cpu()


def metrics_of(task: Task, loss: float, examples: int, outputs: dict[str, Any]) -> dict[str, float]:
    """Return the metrics of an evaluation by their name in the record."""
    found = {"loss": loss, "examples": examples, **returned(task, "metrics", outputs)}
    return {f"eval/{name}": value for name, value in found.items()}
