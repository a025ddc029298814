"""Check 2, Data: which process reads which example, over two epochs and an evaluation."""

from collections import Counter
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch.utils._pytree import tree_leaves

from src.batches import MicroBatch, evaluation_batches, fetch, training_windows
from src.check.findings import Finding
from src.check.subject import Subject, checksum
from src.reference import DistributedSampler
from src.tasks.base import Examples


class _Positions:
    """A dataset whose examples are their own indices: what is read from it says which were asked for."""

    def __init__(self, length: int) -> None:
        self._length = length

    def __len__(self) -> int:
        return self._length

    def __getitems__(self, indices: list[int]) -> list[int]:
        return indices


class _ReadsPositions:
    """The task, with its own order of the data, but positions in place of examples."""

    def __init__(self, subject: Subject) -> None:
        self._subject = subject

    def order(self, _: Any, random: np.random.Generator, global_batch_size: int) -> np.ndarray:
        return self._subject.task.order(self._subject.train_set, random, global_batch_size)

    def augmented(self, train: Examples, _: list[int]) -> Examples:
        return train

    collate = list


def examine(subject: Subject) -> Iterator[Finding]:
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
    config = subject.config.model_copy(update={"task": _ReadsPositions(subject)})
    positions = _Positions(len(subject.train_set))
    steps = subject.schedule.steps_per_epoch
    windows = list(training_windows(subject.accelerator, config, positions, 0, 2 * steps))
    read = _together(subject, windows)
    epochs, expected = [read[:steps], read[steps:]], [_of_one_process(subject, epoch) for epoch in (0, 1)]
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
            "a step sees other examples than on one process: the curve depends on the number of processes. Deal each "
            "global batch out, from one order that all processes draw alike",
        )
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
    batches = [[batch] for batch in evaluation_batches(subject.accelerator, config, _Positions(len(subject.eval_set)))]
    evaluated = np.concatenate(_together(subject, batches))
    yield _each_once("evaluation: examples read", evaluated, len(subject.eval_set))


def _sample(subject: Subject) -> str:
    """The checksum of some examples of both datasets, as tensors."""
    subject.seed_alike()
    sums = []
    train_set = subject.task.augmented(subject.train_set, [subject.config.seed, 0, 1])
    for dataset in (train_set, subject.eval_set):
        some = np.unique(np.linspace(0, len(dataset) - 1, 8).astype(np.int64))
        batch = fetch(subject.task, dataset, some.tolist())
        sums.append(checksum([leaf for leaf in tree_leaves(batch) if torch.is_tensor(leaf)]))
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


def _of_one_process(subject: Subject, epoch: int) -> list[np.ndarray]:
    sampler = DistributedSampler(subject.config, subject.train_set, rank=0, world_size=1)
    sampler.set_epoch(epoch)
    return list(sampler)


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
