"""How a checkpoint gets onto the disk: by torch.distributed.checkpoint (DCP), which takes half a second to import."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import CheckpointException, HuggingFaceStorageWriter
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.storage import WriteResult

from src.checkpoint import folders
from src.checkpoint.rng import random_file


def new_stager(device: torch.device) -> DefaultStager:
    """What copies tensors to the CPU's memory; it keeps its buffers between saves."""
    on_cuda = device.type == "cuda"
    options = StagingOptions(
        use_pinned_memory=on_cuda, use_shared_memory=False, use_async_staging=False, use_non_blocking_copy=on_cuda
    )
    return DefaultStager(options)


def start_writing(tensors: dict[str, torch.Tensor], writer: Writer, stager: DefaultStager, group: Any) -> Future[Any]:
    """Copies the tensors, and writes the copies in the background.

    Args:
        group: of all processes; None: there is one.
    """
    future = dcp.async_save(
        tensors, storage_writer=writer, async_stager=stager, process_group=group, no_dist=group is None
    )
    assert isinstance(future, Future)
    return future


def failure_of(future: Future[Any]) -> str | None:
    """Why a process could not write; None where all have. Waits.

    Raises:
        Exception: a broken exchange, which would fail again and again.
    """
    try:
        future.result()
    except CheckpointException as error:
        cause = next(iter(error.failures.values()))[0]
        return " ".join(str(cause).split()) or type(cause).__name__
    return None


class Writer(HuggingFaceStorageWriter):
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
