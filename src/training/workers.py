"""Processes that load data while the training process computes (num_workers)."""

import os
import signal
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader

from src.config.config import Config
from src.distributed.process import end_with_parent
from src.tasks.base import Examples


def load_in_workers(
    config: Config, dataset: Examples, sampler: Iterable[list[int]], rank: int, epoch: int
) -> Iterator[Any]:
    """Yield the batches that the sampler picks, collated.

    torch reports a worker's death, unless it died while handing over a batch: raise a RuntimeError for that.
    """
    # for what examples draw themselves: its own for each process and epoch
    seed = int(np.random.default_rng([config.seed, epoch, rank]).integers(2**63))
    loader: DataLoader[Any] = DataLoader(
        dataset,  # type: ignore[arg-type]  # torch's Dataset need not have a length
        batch_sampler=sampler,
        collate_fn=config.task.collate,
        num_workers=config.num_workers,
        worker_init_fn=_ignore_signals,
        generator=torch.Generator().manual_seed(seed),  # torch's own is the one that dropout draws from
    )
    try:
        yield from loader
    except (ConnectionError, EOFError) as error:
        if "DataLoader worker" in str(error):  # the dataset's own
            raise
        raise RuntimeError("a DataLoader worker died: was it killed for lack of memory?") from error


def _ignore_signals(_worker: int) -> None:
    """Keep a worker alive when the launcher or terminal signals the process group: the training process, which saves
    before it ends, still needs it. It ends with that process."""
    os.setpgid(0, 0)
    end_with_parent(signal.SIGKILL)  # on another system torch notices, after 5 seconds
