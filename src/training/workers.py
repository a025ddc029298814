"""Processes that load data while the training process computes (num_workers)."""

import os
import signal
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader

from src.config.config import Config
from src.config.errors import RunError, UserError
from src.distributed.process import end_with_parent
from src.tasks.base import Examples, Task, samples


@dataclass
class Failure:
    """What a worker returns in place of a batch where it finds a mistake: the training process raises it. (What is
    raised in a worker reaches it as text, its traceback printed in the message.)"""

    error: UserError | RunError


@dataclass(frozen=True)
class Batches:
    """Batches by their examples' indices, collated: the dataset of a DataLoader that does not batch by itself."""

    task: Task
    examples: Examples

    def __getitem__(self, indices: list[int]) -> Any:
        try:
            return self.task.collate(samples(self.examples, indices))
        except (UserError, RunError) as error:
            return Failure(error)


def load_in_workers(
    config: Config, dataset: Examples, sampler: Iterable[list[int]], rank: int, epoch: int
) -> Iterator[Any]:
    """Yield the batches that the sampler picks, collated.

    Raises:
        RuntimeError: a worker died.
    """
    # for what examples draw by themselves: another seed for each process and epoch
    seed = int(np.random.default_rng([config.seed, epoch, rank]).integers(2**63))
    loader: DataLoader[Any] = DataLoader(
        Batches(config.task, dataset),  # type: ignore[arg-type]  # torch's Dataset need not have a length
        batch_size=None,
        sampler=sampler,
        collate_fn=as_it_is,
        num_workers=config.num_workers,
        worker_init_fn=_ignore_signals,
        # Without one, each iterator draws its workers' seed from torch's global generator, which dropout draws from: a
        # resume in the middle of an epoch, which makes one iterator more, would then have other masks.
        generator=torch.Generator().manual_seed(seed),
        # Python 3.14 would have a server fork them, which outlives this process, and they it
        multiprocessing_context="fork" if sys.platform == "linux" else None,
    )
    try:
        for batch in loader:
            if isinstance(batch, Failure):
                raise batch.error
            yield batch
    except (ConnectionError, EOFError) as error:
        # the dataset's own error: torch adds to its message which worker raised it
        if "DataLoader worker" in str(error):
            raise
        # torch names a worker's death, except where it died while it handed over a batch
        raise RuntimeError("a DataLoader worker died: was it killed for lack of memory?") from error


def as_it_is(batch: Any) -> Any:
    """Return the batch: torch would make tensors of what else is in it."""
    return batch


def _ignore_signals(_worker: int) -> None:
    """Keep a worker alive when the launcher or terminal signals the process group, as the training process still needs
    it to finish its step and save. Have it end with that process."""
    # the launcher forwards SIGTERM to the whole group of each process
    os.setpgid(0, 0)
    # by the kernel, on Linux; elsewhere the worker itself notices, within 5 seconds
    end_with_parent(signal.SIGKILL)
