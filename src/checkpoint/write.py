"""Save a checkpoint while training continues: copy the tensors, and write the copy in the background.

The docstring of src/checkpoint/__init__.py lists the files of a checkpoint, and what each of them holds.
"""

import contextlib
import json
import time
import warnings
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.storage import WriteResult

from src.checkpoint.files import STATE, discard, incomplete_path, new_folder, publish, sync, write_json, write_text
from src.checkpoint.rng import random_file, random_state
from src.checkpoint.status import write_unfinished
from src.checkpoint.store import Store
from src.checkpoint.tensors import rank_state_dict, run_tensors
from src.config.errors import as_user_error, cause
from src.training.phases import in_phase
from src.training.run import Run
from src.training.state import RunState


class CheckpointWriter:
    """Writes the checkpoints of a run, one after the other. All processes make the same calls."""

    def __init__(self, run: Run, store: Store) -> None:
        """Prepare to write checkpoints of `run` into `store`."""
        self.newest = run.resume.checkpoint
        """The last checkpoint; None: there is none yet."""
        self.pause_seconds = 0.0
        """Total seconds that saves have paused training."""
        self._run, self._store = run, store
        self._group: Any = None
        if torch.distributed.is_initialized():
            # A group of its own: collectives of the background thread must not mix with the loop's. Not made later: the
            # signal that a save answers may have ended the launcher, and with it the store through which groups meet.
            self._group = torch.distributed.new_group(backend="gloo", timeout=store.timeout)
        on_cuda = run.device.type == "cuda"
        # with use_async_staging, a thread would not wait for the optimizer's kernels
        self._options = StagingOptions(
            use_pinned_memory=on_cuda, use_shared_memory=False, use_async_staging=False, use_non_blocking_copy=on_cuda
        )
        self._stager = DefaultStager(self._options)  # keeps its buffers between saves
        self._pending: Any = None
        """The save under way: its StorageWriter, its future, and the seconds that it has paused training."""
        if run.is_main:
            with contextlib.suppress(OSError):
                store.rotate(run.progress.evaluations)  # the settings may keep fewer than before

    def save(self, metrics_bytes: int, run_id: str) -> None:
        """Start writing a checkpoint of the current state, after the previous one is done. Only the main
        process's arguments count: the length of metrics.jsonl, and the id under which the run is logged."""
        started = time.perf_counter()
        self.poll(wait=True)
        run = self._run
        checkpoint = self._store.folder / f"step_{run.progress.step:08d}"
        if checkpoint == self.newest:
            return
        # not a deep copy, which would take longer with each evaluation: of its dicts, only the one of evaluations
        # changes, and that one is copied
        state = RunState(
            progress=replace(run.progress),
            origin=run.origin,
            metrics_bytes=metrics_bytes,
            run_id=run_id,
            folder=str(run.config.folder.resolve()),
        )
        writer = StorageWriter(checkpoint, state, run, self._store)
        if torch.__version__ < "2.13":  # older stagers close themselves after a save
            self._stager = DefaultStager(self._options)
        tensors = rank_state_dict(run_tensors(run.model, run.optimizers), run.rank, run.world_size)
        with in_phase("save", run):
            future: Any = dcp.async_save(
                tensors, storage_writer=writer, async_stager=self._stager, process_group=self._group
            )
        pause = time.perf_counter() - started
        self._pending = writer, future, pause
        self.pause_seconds += pause

    def poll(self, wait: bool = False) -> None:
        """Report on the checkpoint being written, if it is done. A process that cannot write is a warning. A failed
        collective ends the run, as it would fail every time."""
        if self._pending is None or not (wait or self._pending[1].done()):
            return
        writer, future, pause = self._pending
        self._pending = None
        try:
            future.result()
        except dcp.CheckpointException as error:  # a process could not write
            says = cause(next(iter(error.failures.values()))[0])
            kept = f"the last one is {self.newest}" if self.newest else "there is none yet"
            self._run.tell(f"WARNING: no checkpoint of step {writer.state.progress.step}: {says}; {kept}")
        else:
            self.newest = writer.checkpoint
            self._run.tell(f"checkpoint {self.newest} (paused {1000 * pause:,.0f} ms)")
        if self._run.accelerator.is_local_main_process:
            discard(writer.folder)  # if it was not published on this machine

    def close(self) -> None:
        """Wait for the checkpoint being written, and free the copies' memory."""
        self.poll(wait=True)
        self._stager.close()


class StorageWriter(dcp.HuggingFaceStorageWriter):
    """DCP's safetensors writer, but into a folder that the coordinator publishes once all processes have written."""

    def __init__(self, checkpoint: Path, state: RunState, run: Run, store: Store) -> None:
        self.checkpoint, self.state = checkpoint, state
        self.folder = incomplete_path(checkpoint)
        super().__init__(str(self.folder), save_distributed=True)
        self._rank, self._store, self._random = run.rank, store, random_state(run.device)

    def prepare_local_plan(self, plan: dcp.SavePlan) -> dcp.SavePlan:
        """Make the folder, before any process writes: DCP's own follows a link, and takes what is there."""
        if self._store.is_first:
            new_folder(self.folder)
        return plan

    def write_data(self, plan: dcp.SavePlan, planner: dcp.SavePlanner) -> torch.futures.Future[list[WriteResult]]:
        """Write this process's shard and random state; return their manifest entries as one result. Unlike DCP's own,
        this neither copies the tensors nor holds the interpreter's lock."""
        random = random_file(self._rank)
        shard = f"shard-{self._rank + 1:05d}-model-00001-of-00001.safetensors"  # DCP's name for it
        if not self.folder.exists():
            raise OSError(f"{self.folder} is not on this machine: share output_dir, or set checkpoint.mirror")
        tensors: Any = {item.index.fqn: planner.resolve_data(item) for item in plan.items}
        offsets = {i.index.fqn: {"saved_offsets": i.tensor_data.chunk.offsets} for i in plan.items if i.tensor_data}
        # DCP writes the first two into each file, and expects them when reading
        header = {"DCP_VERSION": "1.0", "format": "pt", "DCP_SHARDING_INFO": json.dumps(offsets)}
        with as_user_error(f"{self.folder / shard} cannot be written, "):
            save_file(tensors, self.folder / shard, header)
        sync(self.folder / shard)
        write_json(self.folder / random, self._random)
        files = self._store.record(self.folder, random, shard)
        done: Any = torch.futures.Future()
        done.set_result([WriteResult(dcp.metadata.MetadataIndex("files"), size_in_bytes=0, storage_data=files)])
        return done

    def finish(self, metadata: dcp.Metadata, results: list[list[WriteResult]]) -> None:
        """Publish the checkpoint and rotate. Called on the coordinator when all processes have written."""
        write_text(self.folder / STATE, json.dumps(asdict(self.state)))  # bit for bit: NaN stays NaN
        files = self._store.record(self.folder, STATE)
        for (result,) in results:
            files |= result.storage_data
        publish(self.folder, files, self.checkpoint)
        try:
            self._store.rotate(self.state.progress.evaluations)
            write_unfinished(self._store.config.folder, self.checkpoint)
        except Exception as error:  # the new checkpoint is published
            warnings.warn(f"old checkpoints could not be deleted, or status.json not written: {error}", stacklevel=1)
