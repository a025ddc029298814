"""Checks 1 to 3, Launch, Data and Same start: before the first step. What runs is what the accelerate yaml asked for,
each example is read once, and all processes have the weights that one process would begin with."""

import math
import os
from collections.abc import Iterable, Iterator
from dataclasses import replace
from itertools import chain, count, islice
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from accelerate.utils import set_seed
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from src.check.findings import Row, WorstError, finding, finding_alike, gather, relative_error
from src.check.reference import own_share
from src.check.subject import Subject, checksum, named_tensors, num_bytes, shard_like
from src.distributed.accelerator import num_replicas, sharded_units
from src.distributed.launcher import is_set
from src.training.alone import evaluate_alone
from src.training.batches import MicroBatch, evaluation_batches, fetch, samples, training_steps
from src.training.gradients import to_local
from src.training.run import Run

APART = "each process trains a model of its own: launcher and script disagree on what is distributed"
NOT_APPLIED = (
    "what the yaml asks for was not applied: look for keys that Accelerate ignores, variables ACCELERATE_* in the "
    "environment, and a model that was not passed through prepare()"
)
NOT_WRAPPED = "only the root is wrapped, or not all blocks: name them in the model's _no_split_modules"
NOT_SHARDED = "not all is sharded, or not evenly"
OTHER_DATA = "build_datasets makes other data on each process: unseeded, or in the order of os.listdir or a set"
OTHER_ORDER = (
    "a step sees other examples than on one process, or in another order: the curve depends on the number of "
    "processes. Deal each global batch out, in turn, from one order that all processes draw alike"
)
OTHER_RESUME = (
    "a run that was killed goes on with examples that it has seen in this epoch, or leaves some out: it must begin "
    "where the checkpoint's step says"
)
NOT_SHUFFLED = "set_epoch was forgotten: the order doesn't depend on the epoch, and an earlier one comes again"
OTHER_AUGMENTATION = (
    "an augmentation depends on the process, not on the epoch, or on random numbers of its own: draw it from the seed "
    "that Task.augmented is given and from the example's index"
)
DOCUMENTS_MEET = (
    "packed documents see each other, or have another place in the sequence than by themselves: positions must start "
    "anew, and attention stop, where a document ends"
)
OTHER_WEIGHTS = (
    "processes built different models: seed all alike before build_model (src/training/run.py), and only after it each "
    "in its own way, for dropout"
)
UNSEEDED = (
    "build_model makes other weights on each process for the same seed: it draws from something that "
    "accelerate.utils.set_seed doesn't seed"
)
SAME_DROPOUT = (
    "dropout drops the same units on every process, so that a global batch has less variety than on one: add the "
    "process's rank to the seed once the model is built"
)


def check_launch(subject: Subject) -> Iterator[Row]:
    """Look at processes and model, not at what the launcher or Accelerate says about them."""
    run, world_size = subject.run, int(os.environ.get("WORLD_SIZE", "1"))
    joined = int(run.accelerator.reduce(torch.ones((), device=run.device), "sum"))
    seen = joined == world_size
    yield finding("processes that see each other", str(joined), f"{world_size}, as started", seen, APART)
    wanted = "DDP" if world_size > 1 else "single"
    if is_set("ACCELERATE_USE_FSDP") or run.launch.requested["distributed_type"] == "FSDP":
        wanted = "FSDP"
    kind = "DDP" if isinstance(run.model, DistributedDataParallel) else "single"
    if sharded_units(run.model):
        kind = "FSDP"
    yield finding("strategy", f"{kind}: {run.launch.strategy}", wanted, kind == wanted, NOT_APPLIED)
    if run.launch.note:
        yield finding("stand-in", run.launch.note)
    held = max(gather(num_bytes(map(to_local, run.parameters)))) / 1e6
    if kind == "FSDP":
        yield from _shards(subject, held)
    else:
        yield finding("parameters per process", f"{held:,.2f} MB, all of them")


def _shards(subject: Subject, held: float) -> Iterator[Row]:
    """Look at what FSDP has wrapped and sharded. `held`: the MB of parameters that a process has, at most."""
    run, units, blocks = subject.run, sharded_units(subject.run.model), blocks_to_wrap(subject)
    wrapped = [name for name in blocks if isinstance(subject.unwrapped.get_submodule(name), FSDPModule)]
    measured = f"{units}, {len(wrapped)} of {len(blocks)} blocks among them"
    yield finding("sharded units", measured, "all blocks, and the rest", units > 1 and wrapped == blocks, NOT_WRAPPED)
    num_shards = run.world_size // num_replicas(run.accelerator)
    largest = sum(4 * largest_shard(p, num_shards) for p in subject.reference.parameters()) / 1e6
    total = num_bytes(subject.reference.parameters()) / 1e6
    whole = [name for name, p in run.model.named_parameters() if not isinstance(p, DTensor)]
    measured = f"{held:,.2f} MB of {total:,.2f} ({held / total:.1%})"
    if whole:
        measured += f", all of {whole[0]}"
    is_even = held <= largest and not whole
    yield finding("parameters per process", measured, f"{largest:,.2f} MB", is_even, NOT_SHARDED)


def largest_shard(parameter: Tensor, world_size: int) -> int:
    """Return the elements of the first process's shard: FSDP divides the first dimension, and pads the other shards."""
    return math.ceil(parameter.shape[0] / world_size) * parameter[0].numel() if parameter.ndim else 1


def blocks_to_wrap(subject: Subject) -> list[str]:
    """Return the names of the modules that FSDP is to wrap one by one; none if it goes by their size."""
    if os.environ.get("FSDP_AUTO_WRAP_POLICY", "TRANSFORMER_BASED_WRAP") != "TRANSFORMER_BASED_WRAP":
        return []
    from_yaml = subject.run.accelerator.state.fsdp_plugin.transformer_cls_names_to_wrap
    classes = from_yaml or getattr(subject.reference, "_no_split_modules", None) or []
    return [name for name, module in subject.reference.named_modules() if type(module).__name__ in classes]


def reading_indices(run: Run) -> Run:
    """Return the run with its own order of the data, but with examples that are their own indices: what is read shows
    which were asked for."""

    def order(_: Any, random: np.random.Generator, global_batch_size: int) -> np.ndarray:
        return run.task.order(run.train_set, random, global_batch_size)

    counts: dict[str, Any] = {"count_targets": len, "count_tokens": lambda _: (0, 0)}
    task = SimpleNamespace(order=order, augmented=lambda train, _: train, collate=list, **counts)
    config = run.config.model_copy(update={"task": task})
    return replace(run, config=config, train_set=range(len(run.train_set)), eval_set=range(len(run.eval_set)))


def check_data(subject: Subject) -> Iterator[Row]:
    """Follow the run's own path to the data, from sampler to batches, including processes that load data."""
    run, steps = subject.run, subject.steps_per_epoch
    sizes = f"{len(run.train_set):,} and {len(run.eval_set):,} examples"
    datasets = finding_alike("datasets", f"{sizes}, checksum {_sample_checksum(run)}", OTHER_DATA)
    yield datasets
    if datasets["result"] == "fail":
        return
    indexed = reading_indices(run)
    for epoch in (1, 2):
        first, last = (epoch - 1) * steps, epoch * steps
        found, expected = _indices(training_steps(indexed, first, last)), _by_hand(run, first, last)
        yield _each_once(f"epoch {epoch}: examples read", found, len(run.train_set))
        wrong = [n for n, (here, there) in enumerate(zip(found, expected, strict=True), 1) if here != there]
        measured = f"{steps - len(wrong):,} of {steps:,} steps as on one process"
        if wrong:
            measured += f", not step {wrong[0]}"
        yield finding(f"epoch {epoch}: order", measured, "all of them", not wrong, OTHER_ORDER)

    def is_in_order(step: int) -> bool:
        return _indices(training_steps(indexed, step, step + 2)) == _by_hand(run, step, step + 2)

    def is_as_drawn(step: int) -> bool:
        return _are_as_drawn(run, step)

    later = sorted({1, 2, 3, max(2, run.total_steps // steps - 1)})
    begun = [epoch * steps for epoch in later]
    shuffled = f"epochs {', '.join(str(epoch + 1) for epoch in later)}: shuffled anew"
    for what, steps_done, is_right, cause in (
        ("resumed in the epoch", [1, steps - 1], is_in_order, OTHER_RESUME),
        (shuffled, begun, is_in_order, NOT_SHUFFLED),
        ("examples, as drawn", [0, *begun], is_as_drawn, OTHER_AUGMENTATION),
    ):
        wrong = [step for step in steps_done if not is_right(step)]
        measured = f"others after step {wrong[0]:,}" if wrong else "as on one process"
        yield finding(what, measured, "the same", not wrong, cause)
    evaluated = _indices([batch] for batch in evaluation_batches(indexed))
    yield _each_once("evaluation: examples read", evaluated, len(run.eval_set))
    yield from _packing(subject)


def _indices(steps: Iterable[list[MicroBatch]]) -> list[list[int]]:
    """Return for each step the indices that this process reads."""
    return [[index for batch in step if batch.weight for index in batch.data] for step in steps]


def _by_hand(run: Run, first: int, last: int) -> list[list[int]]:
    """Return by hand the indices that this process should read in each step after `first` steps, up to `last`."""
    epoch, done = divmod(first, -(-len(run.train_set) // run.config.global_batch_size))
    shares = (own_share(run.config, run.train_set, of, run.rank, run.world_size) for of in count(epoch))
    return [share.tolist() for share in islice(chain.from_iterable(shares), done, done + last - first)]


def _each_once(what: str, read: list[list[int]], num_examples: int) -> Row:
    """Check that all processes together read each example once; `read` is this one's indices by step. Collective."""
    found = [index for steps in gather(read) for step in steps for index in step]
    counts = np.bincount(np.array(found, dtype=np.int64), minlength=num_examples)
    absent, again = np.flatnonzero(counts == 0), np.flatnonzero(counts > 1)
    distinct = num_examples - len(absent)
    causes = []
    if len(absent):
        causes.append(f"{len(absent):,} left out ({absent[0]}, …): drop_last, or a cut at the end")
    if len(again):
        causes.append(f"{len(again):,} read more than once ({again[0]}, …): padding that is counted")
    if len(again) > distinct / 2 and len(absent) > num_examples / 4:
        causes = ["every process reads the same shard: the sampler knows neither rank nor number of processes"]
    measured = f"{distinct:,} of {num_examples:,}, in {len(found):,} reads"
    return finding(what, measured, "each once", not causes, "; ".join(causes))


def _are_as_drawn(run: Run, step: int) -> bool:
    """Return whether the augmented examples of an epoch's first step are what any other process would make of them."""
    size, epoch = run.config.micro_batch(run.world_size), step // run.steps_per_epoch
    (micro_batches,) = training_steps(run, step, step + 1)
    set_seed(run.config.seed)
    augmented = run.task.augmented(run.train_set, [run.config.seed, epoch, 1])
    (own,) = _by_hand(run, step, step + 1)
    expected = [fetch(run.task, augmented, own[i : i + size]) for i in range(0, len(own), size)]
    return checksum([batch.data for batch in micro_batches if batch.weight]) == checksum(expected)


def _sample_checksum(run: Run) -> str:
    """Return the checksum of some examples of both datasets."""
    set_seed(run.config.seed)
    augmented = run.task.augmented(run.train_set, [run.config.seed, 0, 1])
    return checksum([fetch(run.task, dataset, _some(dataset, 8)) for dataset in (augmented, run.eval_set)])


def _some(dataset: Any, most: int) -> list[int]:
    """Return the indices of some examples, spread over the dataset."""
    return np.unique(np.linspace(0, len(dataset) - 1, most).astype(np.int64)).tolist()


def _packing(subject: Subject) -> Iterator[Row]:
    """Compare some examples that pack several documents with each of these by itself."""
    run, task, errors = subject.run, subject.run.task, WorstError()
    packed: dict[int, tuple[Any, Any]] = {}  # by the number of its documents, an example and each of them
    for sample in samples(run.train_set, _some(run.train_set, 64)):
        alone = task.documents(sample)
        if len(alone) > 1:
            packed.setdefault(len(alone), (sample, alone))
    if not packed:
        return
    size = run.config.micro_batch(run.world_size)
    subject.reference.eval()
    with subject.perturbed():
        for number in sorted(packed)[:2]:
            sample, alone = packed[number]
            found, _ = evaluate_alone(task, subject.reference, [sample], size, run.device)
            expected, _ = evaluate_alone(task, subject.reference, alone, size, run.device)
            errors.add({f"an example of {number} documents": relative_error(found, expected)})
    subject.reference.train()
    yield errors.finding("packed: loss, relative error", DOCUMENTS_MEET)


def check_start(subject: Subject) -> Iterator[Row]:
    """Look before the first step. Each process compares its shard of what is sharded, so that a wrong one is named."""
    found, expected = named_tensors(subject.unwrapped), named_tensors(subject.reference)
    yield finding_alike("build_model, seeded alike", f"checksum {checksum(expected)}", UNSEEDED)
    differing = sorted(found.keys() ^ expected.keys())
    for name in [name for name in expected if name in found]:
        shard = to_local(shard_like(expected[name], found[name]))
        if not torch.equal(to_local(found[name]).to(shard.device), shard):
            differing.append(name)
    measured = f"{len(found)} tensors, as on one process"
    if differing:
        measured = differing[0] + (f" and {len(differing) - 1} more differ" if differing[1:] else " differs")
    bound = f"bitwise, for seed {subject.run.config.seed}"
    yield finding("weights and buffers", measured, bound, not differing, OTHER_WEIGHTS)
    drawn = gather(subject.rng_checksum)
    is_own = len(set(drawn)) == len(drawn)
    measured = "each process its own" if is_own else "the same on several processes"
    yield finding("random numbers from here on", measured, "each its own", is_own, SAME_DROPOUT)
