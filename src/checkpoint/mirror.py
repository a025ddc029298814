"""Copies of a run's checkpoints elsewhere, by fsspec (checkpoint.mirror): machines that share no disk resume from them.

    <mirror>/<run_name>/step_00000500/    the checkpoint's files, metrics.jsonl, config.yaml; then manifest.json

A checkpoint in the mirror counts only once its manifest is there. Where the machines share a disk, the main process
copies a checkpoint after it is published. Elsewhere each process copies the files that it wrote, the manifest in the
mirror publishes them, and at the next start each machine fetches the whole checkpoint.
"""

import contextlib
import json
import os
import shutil
import tempfile
import time
import warnings
from collections.abc import Callable, Iterable
from datetime import timedelta
from functools import cache
from multiprocessing.pool import ThreadPool
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import gather_object
from fsspec.callbacks import Callback
from fsspec.core import url_to_fs

from src.checkpoint.folder import list_checkpoints, parse
from src.checkpoint.format import (
    INCOMPLETE,
    MANIFEST,
    STATE,
    Json,
    file_facts,
    is_checkpoint,
    publish,
    read_state,
    remove_incomplete,
    step_of,
    unfinished,
    write_text,
)
from src.checkpoint.integrity import RECORD, manifest, problems, quarantine
from src.checkpoint.occupied import lock
from src.checkpoint.rotation import superfluous
from src.checkpoint.store import Store
from src.config.config import Config
from src.config.errors import RunError, cause, explained
from src.config.terminal import say
from src.distributed.accelerator import local_main_process_first


@cache
def copier() -> ThreadPool:
    """Return this process's thread for copies. One that hangs does not keep the process from ending."""
    return ThreadPool(1)


class Mirror(Store):
    """A store with copies elsewhere. A checkpoint, local or mirrored, is named by its local path."""

    def __init__(self, accelerator: Accelerator, config: Config) -> None:
        """Raise a UserError if the mirror cannot be written. Where the disks are not shared, lock the run's folder on
        the other machines. Collective."""
        super().__init__(config)
        self._accelerator, self._is_main = accelerator, accelerator.is_main_process
        name = config.model_copy(update={"output_dir": "{run_name}"}).folder  # each trial of a sweep has its own
        self.url = f"{str(config.checkpoint.mirror).rstrip('/')}/{name}"
        self._says = f"checkpoint.mirror={config.checkpoint.mirror}: "
        with explained(self._says):
            self._fs, self._root = url_to_fs(self.url)
            self._fs.auto_mkdir = True  # only a file system that has folders, unlike a bucket, looks at it
            if accelerator.is_local_main_process:
                probe = f"{self._root}/{INCOMPLETE}{os.urandom(8).hex()}"
                self._fs.pipe_file(probe, b"probe")
                self._fs.rm_file(probe)
        self._newest: Path | None = None
        self._copied = Callback()
        """Grows with each file, or part of one, that is copied."""
        self._of_main = Path(gather_object([str(self._own)])[0])
        self.is_shared = self._is_disk_shared(accelerator)
        self._is_first = self._is_main if self.is_shared else accelerator.is_local_main_process
        """Whether this process fetches: one where the disks are shared, and elsewhere one on each machine."""
        if self._is_first and not self._is_main:
            lock(config.folder)
            remove_incomplete(self._own)

    def _is_disk_shared(self, accelerator: Accelerator) -> bool:
        """Return whether each process sees a file that the main one makes in the folder of checkpoints. Collective."""
        if accelerator.num_processes == int(os.environ.get("LOCAL_WORLD_SIZE", "1")):
            return True
        self._own.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=self._own) as file:
            of_main = self._own / gather_object([Path(file.name).name])[0]
            return all(gather_object([of_main.exists()]))

    def candidates(self) -> list[Path]:
        if not self._is_main:
            return []
        return sorted({*list_checkpoints(self._own), *self._manifests()}, key=step_of, reverse=True)

    def bring_record(self) -> list[Path]:
        """Keep a local record that begins with the mirror's, and set any other aside."""
        there = list(self._manifests())
        if not there or self._config.resume == "never" or there[0] != self.candidates()[0]:
            return there
        for name in RECORD:
            file, content = self._config.folder / name, self._fs.cat_file(self._path(there[0], name))
            if file.suffix == ".jsonl" and file.exists() and not file.read_bytes().startswith(content):
                quarantine(file)
            if not file.exists():
                write_text(file, content.decode())
        return there

    def fetch(self, checkpoint: Path, wrong: list[str]) -> tuple[Path, list[str]]:
        """Fetch a checkpoint of the run's own: where the disks are shared, only if it is damaged."""
        if checkpoint.parent != self._of_main or (self.is_shared and not wrong):
            return checkpoint, wrong
        checkpoint, files, left = self._own / checkpoint.name, None, list[str]()
        with explained(self._says, raises=RunError):
            if self._is_main:  # others might see less of the mirror
                if checkpoint not in self._manifests() and not any(problems(checkpoint)):
                    self._copy(checkpoint)  # a single machine's, which had not copied it yet
                files = self._manifests().get(checkpoint)
            files = gather_object([files])[0]
            if files is None:
                left = [*wrong, "not in the mirror"]
            with local_main_process_first(self._accelerator):  # as long as it takes
                if files and self._is_first:
                    left = self._fetch(checkpoint, files)
            left = gather_object(left)
        if self._is_main and not left:
            say(f"fetched from {self.url}/{checkpoint.name}")
        return checkpoint, left

    def _fetch(self, checkpoint: Path, files: Json) -> list[str]:
        """Replace the local checkpoint by the mirrored one. Return what is wrong with the mirrored one."""
        incomplete = unfinished(checkpoint)
        incomplete.mkdir(parents=True, exist_ok=True)
        for name, facts in files.items():
            file = incomplete / name
            with contextlib.suppress(FileNotFoundError):
                self._fs.get_file(self._path(checkpoint, name), str(file))
            if not file.exists() or file_facts(file) != facts:
                return [f"{name} in the mirror is missing, or has changed since it was saved"]
        shutil.rmtree(checkpoint, ignore_errors=True)
        publish(incomplete, files, checkpoint)
        return []

    def catch_up(self, checkpoint: Path, is_finished: bool) -> None:
        """Wait for the copy if the run is finished."""
        if self.is_shared and checkpoint not in self._manifests():
            self.start(checkpoint)
            if is_finished:
                self.close()

    def start(self, checkpoint: Path) -> None:
        """Copy a published checkpoint in the background, after the one that is being copied, unless a newer one has
        been published by then."""
        self._newest = checkpoint
        copier().apply_async(self._copy_newest, (checkpoint,))

    def _copy_newest(self, checkpoint: Path) -> None:
        self.copying = checkpoint
        try:
            if checkpoint != self._newest:
                raise RunError(f"{self.url} takes longer than from save to save")
            self._copy(checkpoint)
            say(f"mirrored to {self.url}/{checkpoint.name}")
        except Exception as error:
            say(f"WARNING: {checkpoint} is not in the mirror: {cause(error)}")
        self.copying = None

    def timeout(self, minutes: float) -> timedelta:
        # a copy takes as long as it takes; `await_all` finds a process that hangs
        return super().timeout(minutes) if self.is_shared else timedelta(days=7)

    def await_all(self, is_busy: Callable[[], bool]) -> None:
        while not self.is_shared and self._count(is_busy()):
            time.sleep(0.1)

    def _count(self, is_busy: bool) -> float:
        """Return how many processes are. Collective."""
        return self._accelerator.reduce(torch.tensor(float(is_busy), device=self._accelerator.device), "sum").item()

    def close(self) -> None:
        """Wait for the copy in progress, as long as `patiently` does. Warn if it is not done by then."""
        try:
            self.patiently(bool)
        except RunError as error:
            say(f"WARNING: the mirror lacks the newest checkpoint: {error}")

    def patiently(self, work: Callable[..., object], *arguments: Any) -> None:
        """Call `work` in the background, after what was begun there before, and wait for it.

        Raise a RunError if the mirror takes nothing for half of timeout_minutes, after which it goes on unattended.
        """
        work_done, copied = copier().apply_async(work, arguments), -1
        while not work_done.ready():
            if copied == self._copied.value:
                raise RunError(f"{self.url} took nothing in half of timeout_minutes={self._config.timeout_minutes:g}")
            copied = self._copied.value
            work_done.wait(30 * self._config.timeout_minutes)
        work_done.get()

    def _copy(self, checkpoint: Path) -> None:
        files = manifest(checkpoint)
        self._put(checkpoint, files.keys() - {STATE})
        self._complete(checkpoint, files)

    def put(self, folder: Path, files: Iterable[str]) -> None:
        if not self.is_shared:
            self.patiently(self._put, folder, files)

    def publish(self, folder: Path, files: Json, checkpoint: Path) -> bool:
        if not self.is_shared:  # the manifest in the mirror publishes it
            self.patiently(self._complete, folder, files)
            return False
        super().publish(folder, files, checkpoint)
        self.start(checkpoint)
        return True

    def _put(self, folder: Path, files: Iterable[str]) -> None:
        """Copy these files of a checkpoint, whose folder may still be an unfinished one."""
        for name in files:
            self._fs.put_file(str(folder / name), self._path(folder, name), callback=self._copied)
            self._copied.relative_update()  # not all file systems tell of parts of a file

    def _complete(self, folder: Path, files: Json) -> None:
        """Copy state.json and the run's record as it was then, add the manifest, and delete superfluous checkpoints."""
        state = read_state(folder)
        self._put(folder, [STATE])
        for name, facts in files.items():
            if self._fs.size(self._path(folder, name)) != facts["bytes"]:
                raise OSError(f"{name} is not in {self.url} as it was written: all machines must see the same mirror")
        record, settings = (self._config.folder / name for name in RECORD)
        self._fs.pipe_file(self._path(folder, record.name), record.read_bytes()[: state.metrics_bytes])
        self._fs.put_file(str(settings), self._path(folder, settings.name))
        self._fs.pipe_file(self._path(folder, MANIFEST), json.dumps({"files": files}).encode())
        try:
            whole = self._manifests()
            kept = whole.keys() - superfluous(list(whole), self._config.checkpoint, state.progress.evaluations)
            for path in self._fs.glob(f"{self._root}/step_*"):
                checkpoint = self._own / Path(path).name
                if checkpoint in kept or not is_checkpoint(checkpoint.name):
                    continue
                if checkpoint in whole:  # first, or a part of it would count
                    self._fs.rm_file(f"{path}/{MANIFEST}")
                self._fs.rm(path, recursive=True)
        except Exception as error:  # in any case, the new one is there
            warnings.warn(f"old checkpoints in {self.url} could not be deleted: {error}", stacklevel=1)

    def _path(self, checkpoint: Path, file: str) -> str:
        return f"{self._root}/{checkpoint.name.removeprefix(INCOMPLETE)}/{file}"

    def _manifests(self) -> dict[Path, Json]:
        """Return the facts about the files of each complete checkpoint in the mirror, the newest first."""
        self._fs.invalidate_cache()
        found = {}
        for path in self._fs.glob(f"{self._root}/step_*/{MANIFEST}"):
            checkpoint = self._own / Path(path).parent.name
            files = parse(self._fs.cat_file(path)).get("files", {})
            leads_here = all(Path(name).name == name for name in files)
            if is_checkpoint(checkpoint.name) and files and leads_here:
                found[checkpoint] = files
        return {checkpoint: found[checkpoint] for checkpoint in sorted(found, key=step_of, reverse=True)}
