"""Saving while training goes on: the tensors are copied, and the copy is written in the background."""

from __future__ import annotations

import shutil
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import asdict
from datetime import timedelta
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from torch import nn
from torch.optim import Optimizer

from src.checkpoint import folders
from src.checkpoint.rng import random_state
from src.config import Config
from src.progress import Progress


class Saver:
    """Publishes checkpoints of a run, one after the other. All processes make the same calls."""

    def __init__(
        self,
        accelerator: Accelerator,
        config: Config,
        model: nn.Module,
        optimizers: list[Optimizer],
        newest: Path | None,
        say: Callable[[str], None],
    ) -> None:
        """Args:
        model, optimizers: as prepared.
        newest: the checkpoint that the run continues from.
        say: tells the user, on the main process.
        """
        self.newest = newest
        self.pause_seconds = 0.0
        """For how long all saves together kept the loop from training."""
        self._config = config
        self._model, self._optimizers = model, optimizers
        self._say = say
        self._rank, self._world_size = accelerator.process_index, accelerator.num_processes
        self._device = accelerator.device
        self._group: Any = None
        if torch.distributed.is_initialized():  # of its own: the background thread must not mix with the loop
            timeout = timedelta(minutes=config.timeout_minutes)
            self._group = torch.distributed.new_group(backend="gloo", timeout=timeout)
        self._stager: Any = None
        self._running: tuple[Path, Future[Any]] | None = None
        self._pause = 0.0
        self._calls = 0
        self._importing = threading.Thread(target=import_module, args=("src.checkpoint.write",), daemon=True)

    def save(self, progress: Progress, about: dict[str, Any]) -> None:
        """Starts to write a checkpoint of the state as it is now; waits for the one before, and for the copy.

        Args:
            about: what to keep in state.json besides `progress`.
        """
        from src.checkpoint.tensors import own_share, run_tensors
        from src.checkpoint.write import Writer, new_stager, start_writing

        started = time.perf_counter()
        self.collect(wait=True)
        checkpoint = folders.step_folder(self._config.folder / "checkpoints", progress.step)
        if checkpoint == self.newest:
            return
        writer = Writer(
            checkpoint,
            {"progress": asdict(progress), **about},
            random_state(self._device),
            self._rank,
            lambda: folders.rotate(checkpoint.parent, self._config),
        )
        self._stager = self._stager or new_stager(self._device)
        tensors = own_share(run_tensors(self._model, self._optimizers), self._rank, self._world_size)
        future = start_writing(tensors, writer, self._stager, self._group)
        self._running = checkpoint, future
        self._pause = time.perf_counter() - started
        self.pause_seconds += self._pause

    def collect(self, wait: bool = False) -> None:
        """Says what became of the checkpoint that is being written, if it is done; a failure doesn't end the run."""
        self._calls += 1
        if self._calls == 2 and self._config.num_workers == 0:  # processes that load data are forked between imports
            self._importing.start()  # training goes on meanwhile, where the first step, or the first save, would wait
        if self._running is None or not (wait or self._running[1].done()):
            return
        from src.checkpoint.write import failure_of

        checkpoint, future = self._running
        self._running = None
        failure = failure_of(future)
        if failure is None:
            self.newest = checkpoint
            self._say(f"checkpoint {checkpoint} (paused {1000 * self._pause:,.0f} ms)")
            return
        if self._rank == 0:
            shutil.rmtree(folders.unpublished(checkpoint), ignore_errors=True)
        kept = f"the last one is {self.newest}" if self.newest else "there is none yet"
        self._say(f"WARNING: no checkpoint of step {folders.step_of(checkpoint)}: {failure}; {kept}")

    def finish(self) -> None:
        """Waits for the checkpoint that is being written, and frees the memory of the copies."""
        self.collect(wait=True)
        if self._importing.is_alive():
            self._importing.join()
        if self._stager:
            self._stager.close()
