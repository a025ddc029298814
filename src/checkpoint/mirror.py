"""Copies of a run's checkpoints in another file system (checkpoint.mirror), from which machines without a shared disk
resume.

    <mirror>/<run_name>/step_00000500/    the checkpoint's files, metrics.jsonl, config.yaml; then manifest.json

A checkpoint in the mirror counts only once its manifest is there. If the machines share a disk, the main process copies
each checkpoint after publishing it. Otherwise each process copies the files that it wrote, the manifest in the mirror
publishes them, and at the next start each machine fetches the whole checkpoint.
"""

import contextlib
import json
import os
import shutil
import tempfile
import warnings
from collections.abc import Callable, Iterable
from functools import cache
from multiprocessing.pool import ThreadPool
from pathlib import Path
from typing import Any

from accelerate import Accelerator
from accelerate.utils import gather_object
from fsspec.callbacks import Callback
from fsspec.core import url_to_fs

from src.checkpoint.compatibility import read_state
from src.checkpoint.files import (
    INCOMPLETE,
    MANIFEST,
    STATE,
    Json,
    file_facts,
    incomplete_path,
    is_checkpoint_name,
    json_object,
    list_checkpoints,
    publish,
    remove_incomplete,
    step_of,
    write_text,
)
from src.checkpoint.integrity import RUN_COPIES, manifest, problems, quarantine
from src.checkpoint.output_dir import lock
from src.checkpoint.store import Store, chosen
from src.config.config import Config
from src.config.environment import LaunchEnvironment
from src.config.errors import RunError, cause, explained
from src.config.terminal import say
from src.distributed.accelerator import local_main_process_first


@cache
def copier() -> ThreadPool:
    """Return this process's copying thread. It does not keep the process from ending, even if it hangs."""
    return ThreadPool(1)


class Mirror(Store):
    """A store with copies in a mirror. A checkpoint is named by its local path, even if only the mirror has it."""

    def __init__(self, accelerator: Accelerator, config: Config) -> None:
        """Raise a UserError if the mirror is not writable. Without a shared disk, lock the output folder on the other
        machines. Collective."""
        super().__init__(config)
        self._accelerator, self._is_main = accelerator, accelerator.is_main_process
        name = config.model_copy(update={"output_dir": "{run_name}"}).folder  # includes the trial of a sweep
        self.url = f"{str(config.checkpoint.mirror).rstrip('/')}/{name}"
        self._says = f"checkpoint.mirror={config.checkpoint.mirror}: "
        with explained(self._says):
            self._fs, self._root = url_to_fs(self.url)
            self._fs.auto_mkdir = True  # for file systems with folders
            if accelerator.is_local_main_process:
                probe = f"{self._root}/{INCOMPLETE}{os.urandom(8).hex()}"
                self._fs.pipe_file(probe, b"probe")
                self._fs.rm_file(probe)
        self._newest: Path | None = None
        self._copied = Callback()
        """Counts the files, or parts of files, that have been copied."""
        self._of_main = gather_object([self._own])[0]
        self.is_shared = self._is_disk_shared()
        self._is_first = self._is_main if self.is_shared else accelerator.is_local_main_process
        """Whether this process fetches checkpoints: one does on each disk."""
        if self._is_first and not self._is_main:
            lock(config.folder)
            remove_incomplete(self._own)

    def _is_disk_shared(self) -> bool:
        """Return whether all processes see a file that the main process creates beside the checkpoints. Collective."""
        if self._accelerator.num_processes == LaunchEnvironment().local_world_size:
            return True
        self._own.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=self._own) as file:
            of_main = self._own / gather_object([Path(file.name).name])[0]
            return all(gather_object([of_main.exists()]))

    def candidates(self) -> list[Path]:
        if not self._is_main:
            return []
        return sorted({*list_checkpoints(self._own), *self._manifests()}, key=step_of, reverse=True)

    def fetch_run_files(self) -> list[Path]:
        """Keep a local metrics.jsonl that begins with the mirror's, and set any other aside."""
        there = list(self._manifests())
        if not there or self._config.resume == "never" or there[0] != self.candidates()[0]:
            return there
        for name in RUN_COPIES:
            file, content = self._config.folder / name, self._fs.cat_file(self._path(there[0], name))
            if file.suffix == ".jsonl" and file.exists() and not file.read_bytes().startswith(content):
                quarantine(file)
            if not file.exists():
                write_text(file, content.decode())
        return there

    def fetch_checkpoint(self, checkpoint: Path, wrong: list[str]) -> tuple[Path, list[str]]:
        """Fetch a checkpoint of this run. With a shared disk, do so only if it is damaged."""
        if checkpoint.parent != self._of_main or (self.is_shared and not wrong):
            return checkpoint, wrong
        checkpoint, files, left = self._own / checkpoint.name, None, list[str]()
        with explained(self._says, raises=RunError):
            if self._is_main:  # others may not see all of the mirror yet
                if checkpoint not in self._manifests() and not any(problems(checkpoint)):
                    self._copy_checkpoint(checkpoint)  # saved by a single machine that had not copied it yet
                files = self._manifests().get(checkpoint)
            files = gather_object([files])[0]
            if files is None:
                left = [*wrong, "not in the mirror"]
            with local_main_process_first(self._accelerator):  # without a timeout
                if files and self._is_first:
                    left = self._fetch(checkpoint, files)
            left = gather_object(left)
        if self._is_main and not left:
            say(f"fetched from {self.url}/{checkpoint.name}")
        return checkpoint, left

    def _fetch(self, checkpoint: Path, files: Json) -> list[str]:
        """Replace the local checkpoint with the mirrored one. Return what is wrong with that."""
        incomplete = incomplete_path(checkpoint)
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
            self.copy_in_background(checkpoint)
            if is_finished:
                self.close()

    def copy_in_background(self, checkpoint: Path) -> None:
        """Copy a published checkpoint once the current copy is done, unless a newer one has been published by then."""
        self._newest = checkpoint
        copier().apply_async(self._copy_newest, (checkpoint,))

    def _copy_newest(self, checkpoint: Path) -> None:
        self.copying = checkpoint
        try:
            if checkpoint != self._newest:
                raise RunError(f"{self.url} is slower than the saves")
            self._copy_checkpoint(checkpoint)
            say(f"mirrored to {self.url}/{checkpoint.name}")
        except Exception as error:
            say(f"WARNING: {checkpoint} is not in the mirror: {cause(error)}")
        self.copying = None

    def close(self) -> None:
        """Wait for the copy in progress, as `await_copy` does. Warn if it fails."""
        try:
            self.await_copy(bool)
        except RunError as error:
            say(f"WARNING: the mirror lacks the newest checkpoint: {error}")
        else:
            copier().close()  # a pool that is still open at exit prints an exception
            copier.cache_clear()

    def await_copy(self, work: Callable[..., object], *arguments: Any) -> None:
        """Call `work` in the copying thread, after what is queued there, and wait for it.

        Raise a RunError if the mirror accepts nothing for half of timeout_minutes; `work` then continues unattended.
        """
        work_done, copied = copier().apply_async(work, arguments), -1
        while not work_done.ready():
            if copied == self._copied.value:
                raise RunError(
                    f"{self.url} accepted nothing for half of timeout_minutes={self._config.timeout_minutes:g}"
                )
            copied = self._copied.value
            work_done.wait(30 * self._config.timeout_minutes)
        work_done.get()

    def _copy_checkpoint(self, checkpoint: Path) -> None:
        files = manifest(checkpoint)
        self._put(checkpoint, files.keys() - {STATE})
        self._complete(checkpoint, files)

    def put(self, folder: Path, files: Iterable[str]) -> None:
        if not self.is_shared:
            self.await_copy(self._put, folder, files)

    def publish_checkpoint(self, folder: Path, files: Json, checkpoint: Path) -> bool:
        if not self.is_shared:  # the manifest in the mirror publishes it
            self.await_copy(self._complete, folder, files)
            return False
        super().publish_checkpoint(folder, files, checkpoint)
        self.copy_in_background(checkpoint)
        return True

    def _put(self, folder: Path, files: Iterable[str]) -> None:
        """Copy these files of a checkpoint, which may still be incomplete."""
        for name in files:
            self._fs.put_file(str(folder / name), self._path(folder, name), callback=self._copied)
            self._copied.relative_update()  # not all file systems report parts of a file

    def _complete(self, folder: Path, files: Json) -> None:
        """Copy state.json, and metrics.jsonl as it was then; add the manifest; delete superfluous checkpoints."""
        state = read_state(folder)
        self._put(folder, [STATE])
        for name, facts in files.items():
            if self._fs.size(self._path(folder, name)) != facts["bytes"]:
                raise OSError(f"{name} in {self.url} differs from what was written: all machines need the same mirror")
        metrics, settings = (self._config.folder / name for name in RUN_COPIES)
        self._fs.pipe_file(self._path(folder, metrics.name), metrics.read_bytes()[: state.metrics_bytes])
        self._fs.put_file(str(settings), self._path(folder, settings.name))
        self._fs.pipe_file(self._path(folder, MANIFEST), json.dumps({"files": files}).encode())
        try:
            whole = self._manifests()
            kept = chosen(list(whole), self._config.checkpoint, state.progress.evaluations)
            for path in self._fs.glob(f"{self._root}/step_*"):
                checkpoint = self._own / Path(path).name
                if checkpoint in kept or not is_checkpoint_name(checkpoint.name):
                    continue
                if checkpoint in whole:  # first, or the rest would count as a checkpoint
                    self._fs.rm_file(f"{path}/{MANIFEST}")
                self._fs.rm(path, recursive=True)
        except Exception as error:  # the new checkpoint is complete
            warnings.warn(f"old checkpoints in {self.url} could not be deleted: {error}", stacklevel=1)

    def _path(self, checkpoint: Path, file: str) -> str:
        return f"{self._root}/{checkpoint.name.removeprefix(INCOMPLETE)}/{file}"

    def _manifests(self) -> dict[Path, Json]:
        """Return the manifest of each complete checkpoint in the mirror, newest first."""
        self._fs.invalidate_cache()
        found = {}
        for path in self._fs.glob(f"{self._root}/step_*/{MANIFEST}"):
            checkpoint = self._own / Path(path).parent.name
            files = json_object(self._fs.cat_file(path)).get("files", {})
            leads_here = all(Path(name).name == name for name in files)
            if is_checkpoint_name(checkpoint.name) and files and leads_here:
                found[checkpoint] = files
        return {checkpoint: found[checkpoint] for checkpoint in sorted(found, key=step_of, reverse=True)}
