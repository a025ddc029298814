"""Load data in worker processes while the training process computes (num_workers)."""

import os
import signal
import sys
from collections.abc import Iterable, Iterator
from functools import partial
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader

from src.config.config import Config
from src.config.errors import RunError, UserError
from src.distributed.process import end_with_parent
from src.tasks.base import Examples, Task, samples


def fetch_or_error(task: Task, examples: Examples, indices: list[int]) -> Any:
    """Return these examples, collated, or an error for the training process: raised here, it would arrive with a
    traceback in its message."""
    try:
        return task.collate(samples(examples, indices))
    except (UserError, RunError) as error:
        return error


def workers_if_any(
    config: Config[Task], dataset: Examples, batches: Iterable[list[int]], rank: int, epoch: int
) -> Iterator[Any] | None:
    """Return what yields the batches of these indices, collated by workers; None without workers."""
    if not config.num_workers:
        return None
    # seeds the random numbers that examples draw by themselves: different in each process and epoch
    seed = int(np.random.default_rng([config.seed, epoch, rank]).integers(2**63))
    loader: DataLoader[Any] = DataLoader(
        range(sys.maxsize),  # type: ignore[arg-type]  # no torch Dataset, but indices, which collate_fn makes batches of
        batch_sampler=batches,
        collate_fn=partial(fetch_or_error, config.task, dataset),
        num_workers=config.num_workers,
        worker_init_fn=_ignore_signals,
        # Without a generator, each iterator draws its workers' seed from torch's global one, which dropout draws from
        # too: a resume within an epoch, which makes one more iterator, would have other masks.
        generator=torch.Generator().manual_seed(seed),
        # Python 3.14's default, a fork server, would outlive this process, and so would its workers
        multiprocessing_context="fork" if sys.platform == "linux" else None,
    )
    return _without_errors(loader)


def _without_errors(loader: DataLoader[Any]) -> Iterator[Any]:
    """Yield the batches. Raise a worker's UserError or RunError here, and a RuntimeError if a worker died."""
    try:
        for batch in loader:
            if isinstance(batch, UserError | RunError):
                raise batch
            yield batch
    except (ConnectionError, EOFError) as error:
        # the dataset's own error, to whose message torch adds which worker raised it
        if "DataLoader worker" in str(error):
            raise
        # torch reports a worker's death, unless it died while handing over a batch
        raise RuntimeError("a DataLoader worker died: was it killed for lack of memory?") from error


def _ignore_signals(_worker: int) -> None:
    """Protect a worker from signals to the process group: the training process needs it to finish its step and save.
    Have it end with that process."""
    # the launcher forwards SIGTERM to each process's whole group
    os.setpgid(0, 0)
    # the kernel sees to that on Linux; elsewhere the worker notices within 5 seconds
    end_with_parent(signal.SIGKILL)
