"""Check 2, Data: which process reads which example, over two epochs and an evaluation."""

from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from accelerate.utils import send_to_device, set_seed
from torch.utils._pytree import tree_leaves

from src.check.advice import ADVICE
from src.check.findings import Row, WorstError, finding, gather, relative_error
from src.check.subject import Subject, checksum
from src.data.loading import MicroBatch, evaluation_batches, fetch, samples, training_steps
from src.reference import own_share
from src.run import Run


def reading_indices(run: Run) -> Run:
    """Return the run with its own order of the data, but with examples that are their own indices: what is read says
    which were asked for."""

    def order(_: Any, random: np.random.Generator, global_batch_size: int) -> np.ndarray:
        return run.task.order(run.train_set, random, global_batch_size)

    task = SimpleNamespace(order=order, augmented=lambda train, _: train, collate=list)
    config = run.config.model_copy(update={"task": task})
    return replace(run, config=config, train_set=range(len(run.train_set)), eval_set=range(len(run.eval_set)))


def check_data(subject: Subject) -> Iterator[Row]:
    """Follow the run's own path to the data, from sampler to batches, processes that load data among it."""
    row, run, steps = partial(finding, "Data"), subject.run, subject.steps_per_epoch
    seen = gather((len(run.train_set), len(run.eval_set), _sample_checksum(run)))
    others = ", ".join(str(rank) for rank, of_rank in enumerate(seen) if of_rank != seen[0])
    sizes = f"{seen[0][0]:,} and {seen[0][1]:,} examples"
    yield row("datasets", f"not those of process 0 on {others}" if others else sizes, "the same on all", not others)
    if others:
        return
    indexed = reading_indices(run)
    found = _indices(training_steps(indexed, 0, 2 * steps))
    expected = [indices.tolist() for epoch in (0, 1) for indices in _by_hand(run, epoch)]
    epochs = [gather(found[:steps]), gather(found[steps:])]
    for epoch, first in enumerate((0, steps)):
        yield _each_once(f"epoch {epoch + 1}: examples read", epochs[epoch], len(run.train_set))
        wrong = [step for step in range(steps) if found[first + step] != expected[first + step]]
        measured = f"{steps - len(wrong):,} of {steps:,} steps as on one process"
        measured += f", not step {wrong[0] + 1}" if wrong else ""
        yield row(f"epoch {epoch + 1}: order", measured, "all of them", not wrong)
    spans = [(done, min(done + 2, 2 * steps)) for done in (1, steps - 1)]
    wrong = [done for done, last in spans if _indices(training_steps(indexed, done, last)) != expected[done:last]]
    others = f"other examples after step {', '.join(map(str, wrong))}"
    measured = others if wrong else "the next two steps as on one process"
    yield row("resumed in the epoch", measured, "as without a stop", not wrong)
    other = _first_drawn_otherwise(run, steps)
    measured = f"others in the first step of {other}" if other else "in both epochs' first step as drawn by hand"
    yield row("examples, as drawn", measured, "the same", not other)
    orders = [np.concatenate([step for own in epoch for step in own]) for epoch in epochs]
    is_shuffled = expected[:steps] != expected[steps:]
    same = np.mean(orders[0] == orders[1]) if len(orders[0]) == len(orders[1]) else 0.0
    measured = f"{same:.1%} of the positions as in epoch 1"
    yield row("epoch 2: shuffled anew", measured, "less than all" if is_shuffled else "", same < 1)
    evaluated = gather(_indices([batch] for batch in evaluation_batches(indexed)))
    yield _each_once("evaluation: examples read", evaluated, len(run.eval_set))
    yield from _packing(subject)


def _indices(steps: Iterable[list[MicroBatch]]) -> list[list[int]]:
    """Return for each step the indices that this process reads."""
    return [[index for batch in step if batch.weight for index in batch.data] for step in steps]


def _by_hand(run: Run, epoch: int) -> Iterator[np.ndarray]:
    """Yield the indices that this process should read in each step of an epoch."""
    return own_share(run.config, run.train_set, epoch, run.rank, run.world_size)


def _each_once(what: str, read: list[list[list[int]]], num_examples: int) -> Row:
    """Hold the indices that were read, by process and step, against each example once."""
    found = [index for steps in read for step in steps for index in step]
    counts = np.bincount(np.array(found, dtype=np.int64), minlength=num_examples)
    absent, again = np.flatnonzero(counts == 0), np.flatnonzero(counts > 1)
    distinct, advice = num_examples - len(absent), ADVICE["Data"]
    causes = [advice["left out"].format(len(absent), absent[0])] if len(absent) else []
    causes += [advice["read twice"].format(len(again), again[0])] if len(again) else []
    if len(again) > distinct / 2 and len(absent) > num_examples / 4:
        causes = [advice["same shard"]]
    measured = f"{distinct:,} of {num_examples:,}, in {len(found):,} reads"
    return finding("Data", what, measured, "each once", not causes, "; ".join(causes))


def _first_drawn_otherwise(run: Run, steps_per_epoch: int) -> str:
    """Return the first epoch of two whose first examples, augmented, are not those that any other process would make of
    them; empty: there is none."""
    size = run.config.micro_batch(run.world_size)
    for epoch in (0, 1):
        (micro_batches,) = training_steps(run, epoch * steps_per_epoch, epoch * steps_per_epoch + 1)
        set_seed(run.config.seed)
        augmented = run.task.augmented(run.train_set, [run.config.seed, epoch, 1])
        own = next(_by_hand(run, epoch)).tolist()
        for start, batch in zip(range(0, len(own), size), micro_batches, strict=False):
            if _checksum(batch.data) != _checksum(fetch(run.task, augmented, own[start : start + size])):
                return f"epoch {epoch + 1}"
    return ""


def _sample_checksum(run: Run) -> str:
    """Return that of some examples of both datasets, as tensors."""
    set_seed(run.config.seed)
    batches = []
    for dataset in (run.task.augmented(run.train_set, [run.config.seed, 0, 1]), run.eval_set):
        some = np.unique(np.linspace(0, len(dataset) - 1, 8).astype(np.int64))
        batches.append(fetch(run.task, dataset, some.tolist()))
    return _checksum(batches)


def _checksum(batch: Any) -> str:
    return checksum([leaf for leaf in tree_leaves(batch) if torch.is_tensor(leaf)])


def _packing(subject: Subject) -> Iterator[Row]:
    """Hold some examples into which several documents are packed against each of these by itself."""
    run, task, errors = subject.run, subject.run.task, WorstError()
    some = np.unique(np.linspace(0, len(run.train_set) - 1, 64).astype(np.int64)).tolist()
    packed = [(sample, task.documents(sample)) for sample in samples(run.train_set, some)]
    packed = sorted([pair for pair in packed if len(pair[1]) > 1], key=lambda pair: len(pair[1]))[:2]
    if not packed:
        return
    size = run.config.micro_batch(run.world_size)
    subject.reference.eval()
    with subject.perturbed():
        for number, (sample, alone) in enumerate(packed, start=1):
            expected = _mean_loss(subject, [alone[i : i + size] for i in range(0, len(alone), size)])
            error = relative_error(_mean_loss(subject, [[sample]]), expected)
            errors.add({f"example {number}, {len(alone)} documents": error})
    subject.reference.train()
    yield errors.finding("Data", "packed: loss, relative error")


@torch.no_grad()
def _mean_loss(subject: Subject, batches: list[list[Any]]) -> float:
    """Return the reference's loss, a mean over what it counts in these samples."""
    task, device = subject.run.task, subject.run.device
    sums = [task.loss(subject.reference, send_to_device(task.collate(batch), device)) for batch in batches]
    return float(sum(loss for loss, _ in sums)) / max(1.0, float(sum(count for _, count in sums)))
