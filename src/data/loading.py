"""Which process sees which example at which step, and how per-example results come back in order.

The order of the data is a function of the seed and the epoch alone, and a global batch holds the same examples
however many processes share it. Nothing is padded, repeated or dropped: the last batches are smaller, and a process
that has no example left computes on a stand-in of weight 0, because FSDP's forward and backward are collective.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator
from accelerate.utils import send_to_device
from torch import Tensor
from torch.utils.data import DataLoader

from src.config import Config
from src.process import ignore_signals_in_worker
from src.tasks.base import Examples, Task


@dataclass(frozen=True)
class MicroBatch:
    """What one process passes through the model at once."""

    data: Any
    """Of the task's `collate`, where the dataset is: on the CPU, but for Task.on_device."""
    examples: int
    """How many examples it has; 0: it is a stand-in."""

    def to(self, device: torch.device) -> Any:
        """The data on the device."""
        if device.type == "cpu":
            return self.data
        return send_to_device(self.data, device, non_blocking=True)

    @property
    def weight(self) -> float:
        """1.0; 0.0 for a stand-in."""
        return float(self.examples > 0)


@dataclass(frozen=True)
class Shares:
    """One process's part of each chunk of micro_batch_size x world_size examples: every world_size-th.

    A batch sampler: iterating yields lists of indices, one per micro-batch.
    """

    order: np.ndarray
    """Indices into the dataset in the order of a single process; shape (examples,), int64."""
    window: int
    """Examples per optimizer step, over all processes and micro-batches."""
    micro_batch_size: int
    rank: int
    world_size: int

    def windows(self) -> Iterator[list[np.ndarray]]:
        """For each window this process's indices, an array per micro-batch: the same number on all processes."""
        chunk = self.micro_batch_size * self.world_size
        for start in range(0, len(self.order), self.window):
            window = self.order[start : start + self.window]
            yield [window[i : i + chunk][self.rank :: self.world_size] for i in range(0, len(window), chunk)]

    def __iter__(self) -> Iterator[list[int]]:
        for window in self.windows():
            for share in window:
                yield share.tolist() or self.order[:1].tolist()


def training_steps(
    accelerator: Accelerator, config: Config, dataset: Examples, done: int, total_steps: int
) -> Iterator[list[MicroBatch]]:
    """For each optimizer step this process's micro-batches, from the one after `done` steps on: nothing is replayed."""
    rank, world_size = accelerator.process_index, accelerator.num_processes
    step = done
    while step < total_steps:
        epoch, done_in_epoch = divmod(step, -(-len(dataset) // config.global_batch_size))
        random = np.random.default_rng([config.seed, epoch])
        order = config.task.order(dataset, random, config.global_batch_size)
        order = order[done_in_epoch * config.global_batch_size :]
        shares = Shares(order, config.global_batch_size, config.micro_batch(world_size), rank, world_size)
        epoch_set = config.task.augmented(dataset, [config.seed, epoch, 1])  # 1: other randomness than the order's
        for window in islice(_load(accelerator, config, epoch_set, shares, epoch), total_steps - step):
            step += 1
            yield window


def evaluation_batches(accelerator: Accelerator, config: Config, dataset: Examples) -> Iterator[MicroBatch]:
    """This process's part of the dataset, in order."""
    rank, world_size = accelerator.process_index, accelerator.num_processes
    micro_batch_size = config.micro_batch(world_size)
    order = np.arange(len(dataset))
    shares = Shares(order, micro_batch_size * world_size, micro_batch_size, rank, world_size)
    for (micro_batch,) in _load(accelerator, config, dataset, shares):
        yield micro_batch


def gather_in_order(accelerator: Accelerator, outputs: Tensor, examples: int) -> Tensor:
    """Per-example outputs of all processes in the order of the dataset, on the CPU.

    Args:
        outputs: those of this process's `evaluation_batches`, shape (share, ...).
        examples: how many there are over all processes.
    """
    world_size = accelerator.num_processes
    missing = -(-examples // world_size) - len(outputs)  # 0 or 1, as shares are every world_size-th example
    padded = torch.cat([outputs, outputs.new_zeros(missing, *outputs.shape[1:])])
    gathered = accelerator.gather(padded).view(world_size, *padded.shape)
    return gathered.transpose(0, 1).flatten(0, 1)[:examples].cpu()


def examples_seen(step: int, config: Config, dataset: Examples) -> int:
    """Training examples in the first `step` optimizer steps, over all processes."""
    steps_per_epoch = -(-len(dataset) // config.global_batch_size)
    epochs, steps = divmod(step, steps_per_epoch)
    return epochs * len(dataset) + steps * config.global_batch_size


def fetch(task: Task, dataset: Any, indices: list[int]) -> Any:
    """A batch of these examples."""
    return task.collate(samples(dataset, indices))


def samples(dataset: Any, indices: list[int]) -> Any:
    """Return these examples as the dataset has them, for Task.collate."""
    whole = getattr(dataset, "__getitems__", None)
    return whole(indices) if whole else [dataset[i] for i in indices]


def _load(
    accelerator: Accelerator, config: Config, dataset: Examples, shares: Shares, epoch: int = 0
) -> Iterator[list[MicroBatch]]:
    batches: Iterator[Any]
    if config.num_workers == 0:  # a DataLoader would take as long as a small model's step
        batches = (fetch(config.task, dataset, indices) for indices in shares)
    else:
        # of what examples draw themselves: each process and epoch its own
        seed = int(np.random.default_rng([config.seed, epoch, shares.rank]).integers(2**63))
        loader: DataLoader[Any] = DataLoader(
            dataset,  # type: ignore[arg-type]  # torch's Dataset need not have a length
            batch_sampler=shares,
            collate_fn=config.task.collate,
            num_workers=config.num_workers,
            pin_memory=accelerator.device.type == "cuda",
            worker_init_fn=ignore_signals_in_worker,
            generator=torch.Generator().manual_seed(seed),  # torch's own is the one that dropout draws from
        )
        batches = _naming_the_killed(loader)
    for window in shares.windows():
        yield [MicroBatch(next(batches), len(share)) for share in window]


def _naming_the_killed(loader: DataLoader[Any]) -> Iterator[Any]:
    """Its batches. torch says so where one of its processes died, unless it did while it handed over a batch.

    Raises:
        RuntimeError: it did.
    """
    try:
        yield from loader
    except (ConnectionError, EOFError) as error:
        if "DataLoader worker" in str(error):  # a data set's own
            raise
        raise RuntimeError("a DataLoader worker died: was it killed for want of memory?") from error
