"""Processes that load data while the training process computes (num_workers)."""

import os
import signal
import sys
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader

from src.config.config import Config
from src.config.errors import RunError, UserError  # room: streaming
from src.distributed.process import end_with_parent
from src.tasks.base import Examples


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
        dataset,  # type: ignore[arg-type]  # torch's Dataset need not have a length
        batch_sampler=sampler,
        collate_fn=config.task.collate,
        num_workers=config.num_workers,
        worker_init_fn=_ignore_signals,
        # Without one, each iterator draws its workers' seed from torch's global generator, which dropout draws from: a
        # resume in the middle of an epoch, which makes one iterator more, would then have other masks.
        generator=torch.Generator().manual_seed(seed),
        # Python 3.14 would have a server fork them, which outlives this process, and they it
        multiprocessing_context="fork" if sys.platform == "linux" else None,
    )
    try:
        yield from loader
    except (UserError, RunError) as error:  # room: streaming
        # torch writes the worker's traceback before what it says; ours would keep the workers
        says = str(error).rpartition(f"errors.{type(error).__name__}: ")[2].strip()
        raise type(error)(says) from error.with_traceback(None)
    except (ConnectionError, EOFError) as error:
        # the dataset's own error: torch adds to its message which worker raised it
        if "DataLoader worker" in str(error):
            raise
        # torch names a worker's death, except where it died while it handed over a batch
        raise RuntimeError("a DataLoader worker died: was it killed for lack of memory?") from error


def _ignore_signals(_worker: int) -> None:
    """Keep a worker alive when the launcher or terminal signals the process group, as the training process still needs
    it to finish its step and save. Have it end with that process."""
    # the launcher forwards SIGTERM to the whole group of each process
    os.setpgid(0, 0)
    # by the kernel, on Linux; elsewhere the worker itself notices, within 5 seconds
    end_with_parent(signal.SIGKILL)
