"""Evaluation: the one loop over batches that training, --check and the tools share, and its results in order."""

import math
from collections.abc import Iterable
from typing import NamedTuple

import torch
from accelerate.utils import broadcast_object_list, send_to_device
from torch import Tensor, nn
from torch.utils.data import BatchSampler

from src.distributed.stop import StopSignal
from src.tasks.base import Examples, Metrics, Task, Tensors
from src.tasks.task_checks import require_right
from src.training.batches import MicroBatch, fetch, micro_batch
from src.training.gradients import float64_zeros
from src.training.run import Run


class Evaluation(NamedTuple):
    """What one evaluation found."""

    metrics: Metrics
    """Values by name, eval/…."""
    outputs: Tensors
    """The outputs that Task.tables makes tables from."""


class Scores(NamedTuple):
    """What the evaluation of some batches gives."""

    totals: Tensor
    """The loss summed, its targets and the examples; shape (3,), float64, on the device."""
    outputs: Tensors
    """The outputs of Task.evaluate for each example, by name; shape (examples, ...)."""


@torch.no_grad()
def evaluate_batches(
    task: Task,
    model: nn.Module,
    batches: Iterable[MicroBatch],
    device: torch.device,
    stop: StopSignal | None = None,
) -> Scores | None:
    """Return the scores of this process's batches; None if told to stop meanwhile."""
    # Sums and counts, as a mean of batch means is wrong where the last batch is smaller. In float64: fp32 would stop
    # counting at 2**24, 16.8 million. On the device, until one reduction at the end: the loop is 5 times as fast as
    # with a gather for each batch (docs/figures.md).
    totals = float64_zeros(3, device)
    # views: what is added to them is added to `totals`
    loss_sum, targets, examples = totals.unbind()
    outputs: dict[str, list[Tensor]] = {}
    for batch in batches:
        # also in the middle, as the launcher kills its processes 30 s after SIGTERM
        if stop and stop.any_requested():
            return None
        found = task.evaluate(model, batch.data)
        require_right(task, "evaluate", found)
        loss, batch_outputs = found
        # a dummy batch, of weight 0, is only there because FSDP's forward pass is collective
        loss_sum += loss * batch.weight
        targets += batch.counts["targets"] * batch.weight
        examples += batch.num_examples
        # nothing of a dummy; all of any other batch
        for name, output in batch_outputs.items():
            outputs.setdefault(name, []).append(output[: batch.num_examples])
    joined = {name: torch.cat(of_batches) for name, of_batches in outputs.items()}
    return Scores(totals, joined)


def evaluate_alone(
    task: Task, model: nn.Module, dataset: Examples, batch_size: int, device: torch.device
) -> tuple[float, Tensors]:
    """Evaluate by this process alone, as --check and `python -m src.tools.evaluate` do. Return the mean loss over the
    targets of the whole dataset, and by name what Task.evaluate returned for each example, on the CPU."""
    # in the dataset's order; `evaluation_batches` would need a Run, which a tool has not
    parts = BatchSampler(range(len(dataset)), batch_size, drop_last=False)
    batches = (micro_batch(task, fetch(task, dataset, part), len(part)) for part in parts)
    on_device = (batch._replace(data=send_to_device(batch.data, device)) for batch in batches)
    scores = evaluate_batches(task, model, on_device, device)
    # None only where a StopSignal ends it
    assert scores
    loss_sum, targets, _ = scores.totals.tolist()
    return loss_sum / max(targets, 1), {name: output.cpu() for name, output in scores.outputs.items()}


def gather_in_order(run: Run, outputs: Tensor, num_examples: int) -> Tensor:
    """Return per-example outputs of all processes, in the order of the dataset, on the CPU; of those that share an
    example, the sum. Collective.

    Args:
        outputs: those of this process's `evaluation_batches`; shape (share, ...).
        num_examples: how many examples the dataset has, and so the length of what is returned.
    """
    largest_share = math.ceil(num_examples / run.data_size)
    # A gather takes equal sizes; shares are every data_size-th example, so that one is missing at most.
    # (Accelerate's gather_for_metrics only drops what its own DataLoader has repeated.)
    missing = outputs.new_zeros(largest_share - len(outputs), *outputs.shape[1:])
    padded = torch.cat([outputs, missing])
    gathered = run.accelerator.gather(padded).view(run.data_size, run.cp_size, *padded.shape)
    # undoes the dealing out: the first example of each share, then the second, …, with the padding last
    in_order = gathered.sum(1, dtype=padded.dtype).transpose(0, 1).flatten(0, 1)
    return in_order[:num_examples].cpu()


def metrics_everywhere(run: Run, loss: float, examples: int, outputs: Tensors) -> Metrics:
    """Return the metrics of an evaluation, from what the main process knows, on all processes: they must decide alike
    on early stopping and the best checkpoints. Collective."""
    metrics = metrics_of(run.task, loss, examples, outputs) if run.is_main else {}
    (metrics,) = broadcast_object_list([metrics])
    return metrics


def metrics_of(task: Task, loss: float, examples: int, outputs: Tensors) -> Metrics:
    """Return the metrics of an evaluation, by the names that metrics.jsonl has them under."""
    of_task = task.metrics(outputs)
    require_right(task, "metrics", of_task)
    found = {"loss": loss, "examples": examples, **of_task}
    return {f"eval/{name}": value for name, value in found.items()}
