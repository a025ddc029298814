"""Decide which process sees which example at which step.

The order of the data is a function of the seed and the epoch alone, and a global batch holds the same examples on any
number of processes. Nothing is padded, repeated or dropped: the last batches are smaller, and a process without an
example left computes on a dummy batch of weight 0, because FSDP's forward and backward are collective.
"""

import math
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import islice, tee
from typing import Any, NamedTuple

import numpy as np
import torch
from accelerate.utils import recursively_apply, send_to_device

from src.config.config import Config
from src.config.terminal import bar
from src.distributed.stop import StopSignal
from src.tasks.base import Counts, Examples, Indices, Task, samples
from src.training.progress import StepResult
from src.training.run import Run
from src.training.workers import workers_if_any

LOADERS: list[Callable[[Config[Task], Examples, Iterator[list[int]], int, int], Iterator[Any] | None]] = [
    # functions that load batches elsewhere than in the process itself, if the settings ask for that
    workers_if_any,
]


class MicroBatch(NamedTuple):
    """The examples that one process passes through the model at once."""

    data: Any
    """The batch as the task's `collate` returned it, on the device."""
    num_examples: int
    """Number of examples; 0 for a dummy."""
    counts: Counts
    """What `Task.count` counts. A dummy's are those of its stand-in example; `weight` cancels them."""

    @property
    def weight(self) -> float:
        """Return 0.0 for a dummy, otherwise 1.0."""
        return 1.0 if self.num_examples else 0.0


Steps = Iterator[list[MicroBatch]]
"""This process's micro-batches for each optimizer step."""
Fetched = Iterator[tuple[list[MicroBatch], Counts]]
"""The same, with the counts over all processes."""
TrainStep = Callable[[Run, list[MicroBatch], Counts], StepResult]
"""The type of train_step in train.py."""


class ShardedBatchSampler(NamedTuple):
    """Deals a process its shard of each chunk of micro_batch_size x data_size examples: every data_size-th."""

    order: Indices
    """Indices into the dataset, in the order in which a single process would read them."""
    global_batch_size: int
    """Examples per step, over all processes and micro-batches."""
    micro_batch_size: int
    data_rank: int
    data_size: int

    def steps(self) -> Iterator[list[Indices]]:
        """Yield this process's indices for each step: an array per micro-batch, equally many on all processes."""
        # the examples that all processes together pass through the model at once
        chunk_size = self.micro_batch_size * self.data_size
        for start in range(0, len(self.order), self.global_batch_size):
            batch = self.order[start : start + self.global_batch_size]
            # Cut the global batch first and deal it out second, so that it holds the same examples on any number of
            # processes. Dealing in turn, the shards of a smaller last batch differ by one example at most.
            chunks = [batch[i : i + chunk_size] for i in range(0, len(batch), chunk_size)]
            yield [chunk[self.data_rank :: self.data_size] for chunk in chunks]

    def to_fetch(self, indices: Indices) -> list[int]:
        """Return the examples to fetch for a micro-batch of these indices, or the one for a dummy if it has none."""
        # If a process skipped the forward pass, the others would hang in FSDP's all-gather. So a process without an
        # example left computes on a dummy, which counts for nothing. Any example will do; the last one is sure to be in
        # the step's window when data are streamed.
        return np.asarray(indices).tolist() or [int(self.order[-1])]


def epoch_seed(config: Config, epoch: int, *purpose: int) -> list[int]:
    """Return the seed of an epoch's random numbers, the same on any number of processes, for each `purpose` another."""
    # numpy hashes the list: with the sum of its numbers, seed 1, epoch 0 would have the order of seed 0, epoch 1
    return [config.seed, epoch, *purpose]


def epoch_order(run: Run, epoch: int, done: int) -> Indices:
    """Return the order of an epoch's examples, without those of the first `done` steps."""
    config = run.config
    # Derived from seed and epoch alone: a checkpoint needs no sampler state, only the step, and any number of processes
    # sees the same batches. A global generator would depend on everything else that draws from it.
    random = np.random.default_rng(epoch_seed(config, epoch))
    order = config.task.order(run.train_set, random, config.global_batch_size)
    # a slice: a resume at 99% of an epoch starts as fast as one at 1%
    return order[done * config.global_batch_size :]


def training_steps(run: Run, first: int, last: int | None = None) -> Steps:
    """Return this process's micro-batches for each optimizer step after step `first`, up to and including step `last`
    (None: the run's last one). Nothing is replayed."""
    number = (run.total_steps if last is None else last) - first
    return _on_device(run, islice(_steps_after(run, first), number))


def _steps_after(run: Run, first: int) -> Steps:
    """Yield this process's micro-batches for each step after step `first`, without end."""
    config = run.config
    # only the first epoch after a resume begins in its middle, with `done` > 0
    epoch, done = divmod(first, run.steps_per_epoch)
    while True:
        order = epoch_order(run, epoch, done)
        # a purpose of its own (1), so that augmentation is independent of the order
        augmented = config.task.augmented(run.train_set, epoch_seed(config, epoch, 1))
        yield from _load(
            run, augmented, order, config.global_batch_size, config.forward_batch_size(run.data_size), epoch
        )
        epoch, done = epoch + 1, 0


class CountedSteps(Fetched):
    """Iterates over the steps, each with the counts summed over all processes.

    The loss is divided by the targets of all processes, so their number must be known before the first backward pass.
    An exchange just then would stall every process: the counts are summed during the step before.
    """

    def __init__(self, steps: Steps, stop: StopSignal) -> None:
        self._steps, self._stop = steps, stop
        self._begin_next()

    def __next__(self) -> tuple[list[MicroBatch], Counts]:
        """Return this process's micro-batches for the next step, and the counts over all processes. Collective."""
        micro_batches = self._upcoming
        counts, _ = self._summed()
        # begin before this step is computed, so that the exchange (and on a GPU the loading) overlaps with it
        self._begin_next()
        return micro_batches, counts

    def is_stop_requested(self) -> bool:
        """Return whether any process was asked to stop before the latest step began: all agree. Collective."""
        _, is_requested = self._summed()
        return is_requested

    def _begin_next(self) -> None:
        # after the last step there are no batches and nothing to count
        self._upcoming = next(self._steps, [])
        counts: Counts = {}
        for batch in self._upcoming:
            for name, number in batch.counts.items():
                counts[name] = counts.get(name, 0.0) + batch.weight * number
        self._summed = self._stop.begin_sum(counts)


def evaluation_batches(run: Run) -> Iterator[MicroBatch]:
    """Yield this process's shard of the evaluation set, in order, in batches as large as in training."""
    size = run.config.forward_batch_size(run.data_size)
    global_batch_size = size * run.data_size
    # never shuffled: gather_in_order in evaluation.py relies on the order of the dataset
    order = range(len(run.eval_set))
    batches = _on_device(run, _load(run, run.eval_set, order, global_batch_size, size))
    # each step is a single micro-batch
    for (batch,) in bar("batches evaluated", iterable=batches, total=math.ceil(len(order) / global_batch_size)):
        yield batch


def examples_seen(run: Run, step: int) -> int:
    """Return the number of training examples in the first `step` optimizer steps, over all processes."""
    # not step x global_batch_size: the last batch of each epoch may be smaller
    epochs, steps = divmod(step, run.steps_per_epoch)
    return epochs * len(run.train_set) + steps * run.config.global_batch_size


def fetch_batch(task: Task, dataset: Any, indices: list[int]) -> Any:
    """Return these examples, collated."""
    return task.collate(samples(dataset, indices))


def to_micro_batch(task: Task, data: Any, num_examples: int) -> MicroBatch:
    """Return a collated batch as a micro-batch."""
    return MicroBatch(data, num_examples, task.count(data))


def _load(
    run: Run, dataset: Examples, order: Indices, global_batch_size: int, micro_batch_size: int, epoch: int = 0
) -> Steps:
    config = run.config
    sampler = ShardedBatchSampler(order, global_batch_size, micro_batch_size, run.data_rank, run.data_size)
    # workers read ahead of the steps that their batches make up
    steps, ahead = tee(sampler.steps())
    wanted = (sampler.to_fetch(indices) for step in ahead for indices in step)
    # no DataLoader: its overhead per batch takes as long as a small model's step
    batches: Iterator[Any] = (fetch_batch(config.task, dataset, indices) for indices in wanted)
    for load in LOADERS:
        batches = load(config, dataset, wanted, run.data_rank, epoch) or batches
    for step in steps:
        # without indices the batch is a dummy: it has an example, but that counts for nothing
        yield [to_micro_batch(config.task, next(batches), len(indices)) for indices in step]


def _on_device(run: Run, steps: Steps) -> Steps:
    """Return the steps with their data on the device. On a GPU, a thread collates and copies the next step's data while
    the device computes."""
    device = run.device

    def copy(step: list[MicroBatch]) -> list[MicroBatch]:
        # Each thread has its own current device, initially the first GPU. The device of a single process has no index,
        # and torch refuses to set that.
        if device.index is not None:
            torch.accelerator.set_device_index(device)
        return [batch._replace(data=_copy(batch.data, device)) for batch in step]

    # a CPU needs no copy, and collating in the background would take cores from computing
    if device.type == "cpu":
        return steps
    copied = map(copy, steps)
    # MPS crashes if two threads use it at once (pytorch#197805). A replay takes the host 0.17 ms, less than a second
    # thread waits for the interpreter.
    if device.type == "mps" or getattr(run.config, "cuda_graphs", False):
        return copied
    # 10.3 ms a step instead of 12.2, where collating 4 x 4,096 packed tokens takes 2.0 ms
    return in_background(copied)


def _copy(data: Any, device: torch.device) -> Any:
    if device.type == "cuda":
        # A copy from pageable memory blocks the host; one from pinned memory is only queued. The pinned allocator
        # does not reuse the memory before the copy is done.
        data = recursively_apply(lambda tensor: tensor.pin_memory() if tensor.is_cpu else tensor, data)
    # Queued on the stream of the kernels, which need no event to wait for the data. Other devices may read pageable
    # memory after it was freed: on MPS wrong values arrive (pytorch#189690).
    return send_to_device(data, device, non_blocking=device.type == "cuda")


def in_background(items: Iterator[Any]) -> Iterator[Any]:
    """Yield the items. A thread makes each one while the caller works on the one before."""
    # one ahead is enough: the device computes one step while the host prepares the next, and memory holds only two
    with ThreadPoolExecutor(1) as thread:
        upcoming = thread.submit(next, items, None)
        while (item := upcoming.result()) is not None:
            upcoming = thread.submit(next, items, None)
            yield item
