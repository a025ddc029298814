"""Saving while training goes on: the tensors are copied, and the copy is written in the background."""

from __future__ import annotations

import shutil
import time
import warnings
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import asdict
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from accelerate import Accelerator
from torch import nn
from torch.distributed.checkpoint import CheckpointException, HuggingFaceStorageWriter
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.storage import WriteResult
from torch.optim import Optimizer

from src.checkpoint import folders
from src.checkpoint.random_state import random_file, random_state
from src.checkpoint.tensors import own_share, run_tensors
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
        on_cuda = accelerator.device.type == "cuda"
        self._stager = DefaultStager(  # keeps its buffers between saves
            StagingOptions(
                use_pinned_memory=on_cuda,
                use_shared_memory=False,
                use_async_staging=False,
                use_non_blocking_copy=on_cuda,
            )
        )
        self._running: tuple[Path, Future[Any]] | None = None
        self._pause = 0.0

    def save(self, progress: Progress, about: dict[str, Any]) -> None:
        """Starts to write a checkpoint of the state as it is now; waits for the one before, and for the copy.

        Args:
            about: what to keep in state.json besides `progress`.
        """
        started = time.perf_counter()
        self.collect(wait=True)
        checkpoint = folders.step_folder(self._config.folder / "checkpoints", progress.step)
        if checkpoint == self.newest:
            return
        writer = _Writer(
            checkpoint,
            {"progress": asdict(progress), **about},
            random_state(self._device),
            self._rank,
            lambda: folders.rotate(checkpoint.parent, self._config),
        )
        future = dcp.async_save(
            own_share(run_tensors(self._model, self._optimizers), self._rank, self._world_size),
            storage_writer=writer,
            async_stager=self._stager,
            process_group=self._group,
            no_dist=self._group is None,
        )
        assert isinstance(future, Future)
        self._running = checkpoint, future
        self._pause = time.perf_counter() - started
        self.pause_seconds += self._pause

    def collect(self, wait: bool = False) -> None:
        """Says what became of the checkpoint that is being written, if it is done; a failure doesn't end the run."""
        if self._running is None or not (wait or self._running[1].done()):
            return
        checkpoint, future = self._running
        self._running = None
        try:
            future.result()
        except CheckpointException as error:  # all else is a broken exchange, which would fail again and again
            if self._rank == 0:
                shutil.rmtree(folders.unpublished(checkpoint), ignore_errors=True)
            kept = f"the last one is {self.newest}" if self.newest else "there is none yet"
            self._say(f"WARNING: no checkpoint of step {folders.step_of(checkpoint)}: {_cause(error)}; {kept}")
        else:
            self.newest = checkpoint
            self._say(f"checkpoint {checkpoint} (paused {1000 * self._pause:,.0f} ms)")

    def finish(self) -> None:
        """Waits for the checkpoint that is being written, and frees the memory of the copies."""
        self.collect(wait=True)
        self._stager.close()


class _Writer(HuggingFaceStorageWriter):
    """DCP's writer of safetensors, into a folder that the coordinator publishes when all processes have written."""

    def __init__(
        self,
        checkpoint: Path,
        state: dict[str, Any],
        random: dict[str, Any],
        rank: int,
        rotate: Callable[[], None],
    ) -> None:
        self._checkpoint = checkpoint
        self._folder = folders.unpublished(checkpoint)
        super().__init__(str(self._folder), save_distributed=True)
        self.per_thread_copy_ahead = 0  # the tensors are on the CPU already: no stream of a GPU is needed
        self._state, self._random, self._rank, self._rotate = state, random, rank, rotate

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> torch.futures.Future[list[WriteResult]]:
        """Returns: one entry, the facts about this process's files."""
        shards = {result.storage_data.relative_path for result in super().write_data(plan, planner).wait()}
        random = random_file(self._rank)
        folders.write_json(self._folder / random, self._random)
        facts = {name: folders.file_facts(self._folder / name) for name in sorted({*shards, random})}
        done: torch.futures.Future[list[WriteResult]] = torch.futures.Future()
        done.set_result([WriteResult(MetadataIndex("files"), size_in_bytes=0, storage_data=facts)])
        return done

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Called on the coordinator, when all have written."""
        folders.write_json(self._folder / folders.STATE, self._state)
        files = {folders.STATE: folders.file_facts(self._folder / folders.STATE)}
        for (result,) in results:
            files |= result.storage_data
        for name, facts in files.items():
            file = self._folder / name
            if not file.exists() or file.stat().st_size != facts["bytes"]:
                raise OSError(f"{file} is not as its process wrote it: all machines must share output_dir")
        folders.publish(self._folder, files, self._checkpoint)
        try:
            self._rotate()
        except Exception as error:  # whatever it is, the new one is published
            warnings.warn(f"old checkpoints could not be deleted: {error}", stacklevel=1)


def _cause(error: CheckpointException) -> str:
    cause = next(iter(error.failures.values()))[0]
    return " ".join(str(cause).split()) or type(cause).__name__
