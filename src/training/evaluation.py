"""Evaluate: one loop over batches for training, --check and the tools, and its results in the dataset's order."""

import math
import sys
from collections.abc import Iterable
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from accelerate.utils import send_to_device
from torch import Tensor, nn
from torch.utils.data import BatchSampler

from src.config.errors import raise_if_any
from src.distributed.stop import StopSignal
from src.tasks.base import Examples, Metrics, Table, Task, Tensors
from src.tasks.task_checks import require_right
from src.training.batches import MicroBatch, fetch_batch, to_micro_batch
from src.training.run import Run


class Evaluation(NamedTuple):
    """The results of one evaluation."""

    metrics: Metrics
    """Values by name: eval/…."""
    outputs: Tensors
    """The outputs that Task.tables makes tables from."""
    samples: Table
    """What Task.generate returned."""


class Scores(NamedTuple):
    """The results of evaluating some batches."""

    totals: Tensor
    """Sum of the loss, number of targets, number of examples; shape (3,), float64, on the device (MPS: on the CPU)."""
    outputs: Tensors
    """The outputs of Task.evaluate for each example, by name; shape (examples, ...)."""


@torch.no_grad()
def evaluate_batches(
    task: Task, model: nn.Module, batches: Iterable[MicroBatch], device: torch.device, stop: StopSignal | None = None
) -> Scores | None:
    """Return the scores of this process's batches, or None if the run was stopped meanwhile."""
    # Sum and count: a mean of batch means is wrong if the last batch is smaller. Use float64, as fp32 stops counting at
    # 2**24, 16.8 million. Stay on the device until one all-reduce at the end, 5 times as fast as gathering each batch.
    # Apple's GPUs have no float64: there, the sums are on the CPU, and each batch is waited for.
    totals = torch.zeros(3, dtype=torch.float64, device="cpu" if device.type == "mps" else device)
    # views into `totals`
    loss_sum, targets, examples = totals.unbind()
    outputs: dict[str, list[Tensor]] = {}
    seen = 0
    for batch in batches:
        # don't wait for the last batch: the launcher kills its processes 30 s after SIGTERM
        if stop and stop.any_requested():
            return None
        found = task.evaluate(model, batch.data)
        require_right(task, "evaluate", found)
        loss, batch_outputs = found
        # a dummy batch has weight 0: it is only there because FSDP's forward pass is collective
        loss_sum += (loss * batch.weight).to(totals.device)
        targets += batch.counts["targets"] * batch.weight
        # keep nothing of a dummy, and all of any other batch but for kept_outputs
        for name, output in batch_outputs.items():
            wanted = task.kept_outputs.get(name, sys.maxsize) - seen
            if wanted > 0:  # an empty view would keep the batch in memory
                outputs.setdefault(name, []).append(output[: min(wanted, batch.num_examples)])
        seen += batch.num_examples
    examples += seen
    says = f"{type(task).__name__}.kept_outputs: evaluate returns no"
    raise_if_any(f"{says} {name!r}" for name in task.kept_outputs if name not in outputs)
    return Scores(totals, {name: torch.cat(of_batches) for name, of_batches in outputs.items()})


def evaluate_on_one_process(
    task: Task, model: nn.Module, dataset: Examples, batch_size: int, device: torch.device
) -> tuple[float, Tensors]:
    """Evaluate on this process alone, as --check and `python -m src.tools.evaluate` do. Return the mean loss over the
    targets of the whole dataset, and the outputs of Task.evaluate by name, on the CPU."""
    # in the dataset's order; `evaluation_batches` needs a Run, which the tool does not have
    parts = BatchSampler(range(len(dataset)), batch_size, drop_last=False)
    batches = (to_micro_batch(task, fetch_batch(task, dataset, part), len(part)) for part in parts)
    on_device = (batch._replace(data=send_to_device(batch.data, device)) for batch in batches)
    scores = evaluate_batches(task, model, on_device, device)
    assert scores  # None only if a StopSignal ends it
    loss_sum, targets, _ = scores.totals.tolist()
    return loss_sum / max(targets, 1), {name: output.cpu() for name, output in scores.outputs.items()}


def gather_in_order(run: Run, outputs: Tensor, num_examples: int) -> Tensor:
    """Return the per-example outputs of all processes in the dataset's order, on the CPU. If several processes share an
    example, return the sum of theirs. Collective.

    Args:
        outputs: those of this process's `evaluation_batches`; shape (shard, ...).
        num_examples: of how many of the dataset's first examples to return them.
    """
    largest_shard = math.ceil(num_examples / run.data_size)
    outputs = outputs[:largest_shard]
    # A gather needs equal sizes. Each shard is every data_size-th example, so at most one row of padding is missing.
    # (Accelerate's gather_for_metrics only drops what its own DataLoader has repeated.)
    missing = outputs.new_zeros(largest_shard - len(outputs), *outputs.shape[1:])
    padded = torch.cat([outputs, missing])
    gathered = run.accelerator.gather(padded).view(run.data_size, run.cp_size, *padded.shape)
    # undo the dealing: the first example of each shard, then the second, …, with the padding last
    in_order = gathered.sum(1, dtype=padded.dtype).transpose(0, 1).flatten(0, 1)
    return in_order[:num_examples].cpu()


def metrics_of(task: Task, loss: float, examples: int, outputs: Tensors) -> Metrics:
    """Return the metrics of an evaluation, by their names in metrics.jsonl."""
    of_task = task.metrics(outputs)
    require_right(task, "metrics", of_task)
    found = {"loss": loss, "examples": examples, **of_task}
    return {f"eval/{name}": value for name, value in found.items()}


def evaluate_all(evaluate: Any, run: Run, stop: StopSignal) -> Any:
    """Return what `evaluate(run, stop)` does, with the loss and the accuracy on each of the task's further sets."""
    evaluation = evaluate(run, stop)
    for name, dataset in run.task.eval_sets.items() if evaluation else ():
        other = evaluate(replace(run, eval_set=dataset), stop)
        if other is None:
            return None
        for metric in ("eval/loss", "eval/accuracy"):
            if metric in other.metrics:
                evaluation.metrics[f"{metric}_{name}"] = other.metrics[metric]
    return evaluation


def evaluation_line(metrics: Metrics) -> str:
    """Return metrics as one line of text, without the number of examples, which is the same each time."""
    return "  ".join(
        f"{name} {value:,.{4 * isinstance(value, float)}f}"  # counts are whole numbers
        for name, value in metrics.items()
        if name != "eval/examples"
    )
