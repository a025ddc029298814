"""Check 2, Data: which process reads which example, over two epochs and an evaluation."""

import math
from collections import Counter
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from accelerate.utils import send_to_device
from torch.utils._pytree import tree_leaves

from src.data.loading import MicroBatch, evaluation_batches, fetch, samples, training_steps
from src.check.errors import Worst, off, verdict
from src.check.findings import Finding
from src.check.subject import Reference, Subject, checksum
from src.config import Config
from src.reference import DistributedSampler
from src.tasks.base import Examples, Task


class Positions:
    """A dataset whose examples are their own indices: what is read from it says which were asked for."""

    def __init__(self, length: int) -> None:
        self._length = length

    def __len__(self) -> int:
        return self._length

    def __getitems__(self, indices: list[int]) -> list[int]:
        return indices


class ReadsPositions:
    """The task, with its own order of the data, but positions in place of examples."""

    def __init__(self, subject: Subject) -> None:
        self._subject = subject

    def order(self, _: Any, random: np.random.Generator, global_batch_size: int) -> np.ndarray:
        return self._subject.task.order(self._subject.train_set, random, global_batch_size)

    def augmented(self, train: Examples, _: list[int]) -> Examples:
        return train

    collate = list


def examine(subject: Subject, reference: Reference) -> Iterator[Finding]:
    """Follows the run's own path to the data, from sampler to batches, processes that load data among it."""
    seen = subject.gather((len(subject.train_set), len(subject.eval_set), _sample(subject)))
    is_same = len(set(seen)) == 1
    others = ", ".join(str(rank) for rank, of_rank in enumerate(seen) if of_rank != seen[0])
    yield Finding(
        "Data",
        "datasets",
        f"{seen[0][0]:,} and {seen[0][1]:,} examples" if is_same else f"not those of process 0 on {others}",
        "the same on all",
        is_same,
        "build_datasets makes other data on each process: it shuffles or splits unseeded, or goes by the order "
        "of os.listdir or of a set",
    )
    if not is_same:
        return
    config = subject.config.model_copy(update={"task": ReadsPositions(subject)})
    positions = Positions(len(subject.train_set))
    steps = steps_per_epoch(subject)
    windows = list(training_steps(subject.accelerator, config, positions, 0, 2 * steps))
    read = _together(subject, windows)
    epochs, expected = [read[:steps], read[steps:]], [list(_by_hand(subject, epoch)) for epoch in (0, 1)]
    for number, (found, wanted) in enumerate(zip(epochs, expected, strict=True), start=1):
        yield _each_once(f"epoch {number}: examples read", np.concatenate(found), len(positions))
        differing = [i for i, (a, b) in enumerate(zip(found, wanted, strict=True)) if not np.array_equal(a, b)]
        yield Finding(
            "Data",
            f"epoch {number}: order",
            f"{steps - len(differing):,} of {steps:,} steps as on one process"
            + (f", not step {differing[0] + 1}" if differing else ""),
            "all of them",
            not differing,
            "a step sees other examples than on one process, or in another order: the curve depends on the number of "
            "processes. Deal each global batch out, in turn, from one order that all processes draw alike",
        )
    yield _resumed(subject, config, expected)
    yield _drawn(subject)
    orders = [np.concatenate(epoch) for epoch in epochs]
    is_shuffled = not np.array_equal(np.concatenate(expected[0]), np.concatenate(expected[1]))
    yield Finding(
        "Data",
        "epoch 2: shuffled anew",
        f"{np.mean(orders[0] == orders[1]):.1%} of the positions as in epoch 1"
        if len(orders[0]) == len(orders[1])
        else "another number of examples",
        "less than all" if is_shuffled else "",
        not is_shuffled or not np.array_equal(orders[0], orders[1]),
        "set_epoch was forgotten: the order doesn't depend on the epoch, so that each one is the first again",
    )
    batches = [[batch] for batch in evaluation_batches(subject.accelerator, config, Positions(len(subject.eval_set)))]
    counts = subject.gather(len(batches))
    batches += [[MicroBatch([], 0)] for _ in range(max(counts) - len(batches))]
    evaluated = np.concatenate([np.zeros(0, np.int64), *_together(subject, batches)])
    yield _each_once("evaluation: examples read", evaluated, len(subject.eval_set))
    yield from _packing(subject, reference)


def steps_per_epoch(subject: Subject) -> int:
    """As train.py counts them."""
    return math.ceil(len(subject.train_set) / subject.config.global_batch_size)


def _resumed(subject: Subject, config: Config, expected: list[list[np.ndarray]]) -> Finding:
    """Tell whether a run that goes on reads what comes next, within an epoch and where it ends."""
    wanted, positions = [*expected[0], *expected[1]], Positions(len(subject.train_set))
    wrong = []
    for done in (1, len(expected[0]) - 1):
        windows = training_steps(subject.accelerator, config, positions, done, min(done + 2, len(wanted)))
        found = _together(subject, list(windows))
        if not all(np.array_equal(a, b) for a, b in zip(found, wanted[done:], strict=False)):
            wrong.append(str(done))
    return Finding(
        "Data",
        "resumed in the epoch",
        f"other examples after step {', '.join(wrong)}" if wrong else "the next two steps as on one process",
        "as without a stop",
        not wrong,
        "a run that was killed goes on with examples that it has seen in this epoch, or leaves some out: it must begin "
        "where the checkpoint's step says",
    )


def _drawn(subject: Subject) -> Finding:
    """Tell whether the first examples of two epochs, augmented, are those that any other process would make of them."""
    task, config, steps = subject.task, subject.config, steps_per_epoch(subject)
    rank, world_size = subject.accelerator.process_index, subject.world_size
    size = config.micro_batch(world_size)
    wrong = []
    for epoch in (0, 1):
        (window,) = training_steps(subject.accelerator, config, subject.train_set, epoch * steps, epoch * steps + 1)
        subject.seed_alike()
        augmented = task.augmented(subject.train_set, [config.seed, epoch, 1])
        own = next(iter(_by_hand(subject, epoch, rank, world_size)))
        for i, micro_batch in enumerate(window):
            share = own[i * size : (i + 1) * size].tolist()
            if share and _checksum(micro_batch.data) != _checksum(fetch(task, augmented, share)):
                wrong.append(f"epoch {epoch + 1}")
    return Finding(
        "Data",
        "examples, as drawn",
        f"others in the first step of {wrong[0]}" if wrong else "in both epochs' first step as drawn by hand",
        "the same",
        not wrong,
        "an augmentation depends on the process, not on the epoch, or on random numbers of its own: draw it from the "
        "seed that Task.augmented is given and from the example's index",
    )


def _checksum(batch: Any) -> str:
    """Return that of its tensors."""
    return checksum([leaf for leaf in tree_leaves(batch) if torch.is_tensor(leaf)])


def _packing(subject: Subject, reference: Reference) -> Iterator[Finding]:
    """Some examples into which several documents are packed, against each of these by itself."""
    task: Task = subject.task
    some = np.unique(np.linspace(0, len(subject.train_set) - 1, 64).astype(np.int64)).tolist()
    packed = [sample for sample in samples(subject.train_set, some) if len(task.documents(sample)) > 1]
    if not packed:
        return
    errors, size = Worst(), subject.config.micro_batch(subject.world_size)
    reference.model.eval()
    with reference.perturbed():
        for number, sample in enumerate(sorted(packed, key=lambda sample: len(task.documents(sample)))[:2], start=1):
            alone = task.documents(sample)
            found = _loss(subject, reference, [[sample]])
            expected = _loss(subject, reference, [alone[i : i + size] for i in range(0, len(alone), size)])
            errors.add({f"example {number}, {len(alone)} documents": off(found, expected)})
    reference.model.train()
    yield Finding(
        "Data",
        "packed: loss, relative error",
        *verdict(subject.gather(errors)),
        "packed documents see each other, or have another place in the sequence than by themselves: positions must "
        "start anew, and attention stop, where a document ends",
    )


@torch.no_grad()
def _loss(subject: Subject, reference: Reference, batches: list[list[Any]]) -> float:
    """The mean over what it counts in these samples."""
    sums = [
        subject.task.loss(reference.model, send_to_device(subject.task.collate(batch), subject.device))
        for batch in batches
    ]
    return float(sum(loss for loss, _ in sums)) / max(1.0, float(sum(count for _, count in sums)))


def _sample(subject: Subject) -> str:
    """The checksum of some examples of both datasets, as tensors."""
    subject.seed_alike()
    sums = []
    train_set = subject.task.augmented(subject.train_set, [subject.config.seed, 0, 1])
    for dataset in (train_set, subject.eval_set):
        some = np.unique(np.linspace(0, len(dataset) - 1, 8).astype(np.int64))
        batch = fetch(subject.task, dataset, some.tolist())
        sums.append(_checksum(batch))
    return "-".join(sums)


def _together(subject: Subject, windows: list[list[MicroBatch]]) -> list[np.ndarray]:
    """For each window the indices that all processes read, in the order of the micro-batches, dealt out in turn."""
    own = [[np.asarray(batch.data if batch.weight else [], dtype=np.int64) for batch in window] for window in windows]
    found = []
    for shares in zip(*subject.gather(own), strict=True):
        micro_batches = [_interleaved(list(parts)) for parts in zip(*shares, strict=True)]
        found.append(np.concatenate(micro_batches))
    return found


def _interleaved(parts: list[np.ndarray]) -> np.ndarray:
    """The first of each, the second of each, …"""
    rows = np.full((max(map(len, parts)), len(parts)), -1)
    for column, part in enumerate(parts):
        rows[: len(part), column] = part
    return rows[rows >= 0]


def _by_hand(subject: Subject, epoch: int, rank: int = 0, world_size: int = 1) -> DistributedSampler:
    """Return which examples a process reads in each step of an epoch."""
    sampler = DistributedSampler(subject.config, subject.train_set, rank, world_size)
    sampler.set_epoch(epoch)
    return sampler


def _each_once(what: str, found: np.ndarray, examples: int) -> Finding:
    counts = Counter(found.tolist())
    absent = [index for index in range(examples) if index not in counts]
    again = [index for index, count in counts.items() if count > 1]
    measured = f"{len(counts):,} of {examples:,}, in {len(found):,} reads"
    if len(again) > len(counts) / 2 and len(absent) > examples / 4:
        means = "every process reads the same shard: the sampler knows neither rank nor number of processes"
    else:
        left_out = f"{len(absent):,} left out ({absent[0]}, …): drop_last, or a cut at the end" if absent else ""
        doubled = f"{len(again):,} read more than once ({again[0]}, …): padding that is counted" if again else ""
        means = "; ".join(filter(None, [left_out, doubled]))
    return Finding("Data", what, measured, "each once", not absent and not again, means)
