"""Launch, Data and Same start: check before the first step that the accelerate yaml was applied, that each example is
read once, and that all processes start with the weights that a single process would have."""

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import partial
from itertools import islice
from types import SimpleNamespace
from typing import Any

import torch
from accelerate.utils import set_seed
from torch import nn
from torch.utils._pytree import tree_leaves
from torch.utils.data import BatchSampler, Subset

from src.check.context import CheckContext, checksum, named_tensors
from src.check.findings import Row, finding, gather, none_differ
from src.check.reference import own_indices
from src.config.environment import LaunchEnv
from src.distributed.accelerator import sharded_units
from src.training.batches import MicroBatch, evaluation_batches, fetch_batch, training_steps
from src.training.run import Run

MAX_BATCHES = 50
"""Most batches to evaluate: every process evaluates all of their examples by hand."""
AT_ONCE = 4
"""Examples that a process evaluates at once here, so that there are several batches."""
IMPLEMENTATION = {"params", "lr", "foreach", "fused", "capturable", "differentiable"}
"""Settings of a parameter group that don't change the result, and the learning rate, which has a check of its own."""


def check_launch(context: CheckContext) -> Iterator[Row]:
    """Look at the processes and the model themselves, not at what the launcher or Accelerate says about them."""
    run, asked = context.run, LaunchEnv()
    wanted = "FSDP" if asked.fsdp else "DDP" if asked.world_size > 1 else "one process"
    kind = "DDP" if isinstance(run.model, nn.parallel.DistributedDataParallel) else "one process"
    if units := sharded_units(run.model):
        kind = "FSDP" if len(units) > 1 else "FSDP of the root alone"
    found, expected = f"{kind} x {len(gather(None))}", f"{wanted} x {asked.world_size}"
    yield finding("strategy", found, expected, found == expected)


def reading_indices(run: Run) -> Run:
    """Return the run with indices in place of its examples, in the same order: a batch is a list of what is read."""
    task = SimpleNamespace(
        order=lambda _, *drawn: run.task.order(run.train_set, *drawn),
        augmented=lambda indices, _: indices,
        collate=list,
        count=lambda batch: {"targets": len(batch)},
    )
    config = run.config.model_copy(update={"task": task})
    return replace(run, config=config, train_set=range(len(run.train_set)), eval_set=range(len(run.eval_set)))


def evaluating_less(context: CheckContext) -> Run:
    """Return the run with a shorter evaluation set and small batches. The last batch is a single example, so all
    processes but one compute on a dummy."""
    size = AT_ONCE * context.run.data_size
    most = min(len(context.run.eval_set), MAX_BATCHES * size)
    dataset: Any = Subset(context.run.eval_set, range(most - (most - 1) % size))  # type: ignore[arg-type]
    return replace(context.at(0, micro_batch_size=AT_ONCE), eval_set=dataset)


def check_data(context: CheckContext) -> Iterator[Row]:
    """Follow the run's own data path, from the sampler to the batches, including workers."""
    run, per_epoch = context.run, context.run.steps_per_epoch
    set_seed(run.config.seed)
    some = [fetch_batch(context.task, dataset, spread(dataset, 8)) for dataset in (run.train_set, run.eval_set)]
    datasets = f"{len(run.train_set):,} and {len(run.eval_set):,} examples, checksum {checksum(some)}"
    yield finding("datasets", datasets, "the same on all processes", datasets == gather(datasets)[0])
    indexed = reading_indices(run)
    by_hand = partial(own_indices, run.config, run.train_set, rank=run.data_rank, world_size=run.data_size)
    for what, first in (("epoch 1", 0), ("epoch 1, resumed after step 1", 1)):
        steps = training_steps(indexed, first, first + per_epoch)
        yield _as_by_hand(run, what, steps, [*islice(by_hand(first), per_epoch)])
    others, is_augmented, micro_batch_size = [], False, run.config.forward_batch_size(run.data_size)
    for epoch in (0, 1, 2, max(3, run.total_steps // per_epoch - 1)):
        augmented = run.task.augmented(run.train_set, [run.config.seed, epoch, 1])
        is_augmented |= augmented is not run.train_set
        micro_batches = BatchSampler(next(by_hand(epoch * per_epoch)), micro_batch_size, drop_last=False)
        drawn = [fetch_batch(run.task, augmented, indices) for indices in micro_batches]
        found = [batch.data for batch in context.micro_batches(epoch * per_epoch) if batch.weight]
        if checksum(found) != checksum(drawn):
            others.append(f"epoch {epoch + 1}")
    yield none_differ("the first examples of epochs", others, f"as drawn by hand{', augmented' * is_augmented}")
    less = evaluating_less(context)
    steps = ([batch] for batch in evaluation_batches(reading_indices(less)))
    batches = BatchSampler(range(len(less.eval_set)), AT_ONCE * run.data_size, drop_last=False)
    yield _as_by_hand(run, "evaluation", steps, [batch[run.data_rank :: run.data_size] for batch in batches])


def _as_by_hand(run: Run, what: str, steps: Iterable[list[MicroBatch]], expected: list[list[int]]) -> Row:
    """Compare the indices that this process reads in each step with the expected ones, and count those of all
    processes. Collective."""
    found = [[index for batch in step if batch.weight for index in batch.data] for step in steps]
    # count processes that share sequences once
    read, due = (Counter(tree_leaves(gather(steps)[:: run.cp_size])) for steps in (found, expected))
    measured = f"{read.total():,} read, {(due - read).total():,} missing, {(read - due).total():,} duplicated"
    return finding(what, measured, "as on one process, in this order", found == expected)


def spread(dataset: Any, most: int) -> list[int]:
    """Return the indices of at most `most` examples, spread evenly over the dataset."""
    return [*range(0, len(dataset), -(-len(dataset) // most))]


def check_start(context: CheckContext) -> Iterator[Row]:
    """Compare the run before its first step with the reference."""
    expected = named_tensors(context.reference)
    differing = [name for name, tensor in context.all_tensors() if not torch.equal(tensor, expected[name])]
    yield none_differ("weights and buffers", differing, "as on one process, bitwise")
    settings = _settings(context.unwrapped, context.run.optimizers)
    wanted = _settings(context.reference, context.reference_optimizers)
    wrong = sorted(settings - wanted) or sorted(wanted - settings)
    yield none_differ("settings of the optimizer", wrong, "as in optim")
    alike = gather(context.rng_checksum).count(context.rng_checksum)
    yield finding("processes that draw the same numbers next", str(alike), "1", alike == 1)


def _settings(model: nn.Module, optimizers: list[torch.optim.Optimizer]) -> set[str]:
    """Return a line for each setting of each parameter, such as `fc1.weight: AdamW, weight_decay=0.01`."""
    names = {parameter: name for name, parameter in model.named_parameters()}
    return {
        f"{names[parameter]}: {type(optimizer).__name__}, {setting}={group[setting]}"
        for optimizer in optimizers
        for group in optimizer.param_groups
        for setting in group.keys() - IMPLEMENTATION
        for parameter in group["params"]
    }
