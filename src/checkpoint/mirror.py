"""Copies of a run's checkpoints in another file system (checkpoint.mirror), from which machines without a shared disk
resume.

    <mirror>/<run_name>/step_00000500/    the checkpoint's files, metrics.jsonl; then manifest.json

A checkpoint in the mirror counts only once its manifest is there. If the machines share a disk, the main process copies
each checkpoint after publishing it. Otherwise each process copies the files that it wrote, the manifest in the mirror
publishes them, and at the next start each machine fetches the whole checkpoint.
"""

import os
from functools import cached_property
from multiprocessing.pool import ThreadPool
from pathlib import Path

from accelerate import Accelerator
from accelerate.utils import broadcast_object_list, gather_object
from fsspec.callbacks import Callback
from fsspec.core import url_to_fs

from src.checkpoint.compatibility import read_state
from src.checkpoint.files import (
    INCOMPLETE,
    MANIFEST,
    discard,
    incomplete_path,
    is_checkpoint_name,
    list_checkpoints,
    new_folder,
    remove_incomplete,
    step_of,
    write_text,
)
from src.checkpoint.integrity import manifest, quarantine
from src.checkpoint.store import chosen
from src.config.config import Config
from src.config.errors import RunError, as_run_error, as_user_error, cause
from src.config.terminal import say
from src.distributed.accelerator import local_main_process_first


class Mirror:
    """The mirror of a run. A checkpoint is named by its path in the output folder, even if only the mirror has it."""

    copying: Path | None = None
    """The published checkpoint that is being copied."""

    def __init__(self, accelerator: Accelerator, config: Config) -> None:
        """Find out whether the machines share a disk. Raise a UserError if the mirror is not writable. Collective."""
        self._config, self._own = config, config.folder / "checkpoints"
        self._accepted = Callback()
        """Counts the files, or parts of files, that the mirror has accepted."""
        self.url = f"{str(config.checkpoint.mirror).rstrip('/')}/{config.folder_name}"
        probe = f"{INCOMPLETE}{os.urandom(8).hex()}"
        with as_user_error(f"checkpoint.mirror={config.checkpoint.mirror}: "):
            self._fs, self._root = url_to_fs(self.url, use_listings_cache=False)
            self._fs.auto_mkdir = True  # for file systems with folders
            if accelerator.is_local_main_process:
                self._fs.pipe_file(f"{self._root}/{probe}", b"probe")
                self._fs.rm_file(f"{self._root}/{probe}")
        if accelerator.is_main_process:
            (self._own / probe).mkdir(parents=True)  # deleted with what crashes have left behind
        (of_main,) = broadcast_object_list([probe])
        self.is_disk_shared = all(gather_object([(self._own / of_main).exists()]))

    @cached_property
    def _copier(self) -> ThreadPool:
        """The copying thread. It does not keep the process from ending, even if it hangs."""
        return ThreadPool(1)

    def checkpoints(self, having: str = MANIFEST) -> list[Path]:
        """Return the checkpoints that have such a file in the mirror, newest first; by default, the complete ones."""
        found = {self._own / Path(path).parent.name for path in self._fs.glob(f"{self._root}/step_*/{having}")}
        return sorted((path for path in found if is_checkpoint_name(path.name)), key=step_of, reverse=True)

    def fetch(self, checkpoint: Path, accelerator: Accelerator) -> None:
        """Replace a damaged or missing checkpoint on each disk with the mirror's, if that has it. Fetch its
        metrics.jsonl too, unless the local one continues that. Collective."""
        # as the main process sees the mirror: others may not see all of it yet
        (is_there,) = broadcast_object_list([accelerator.is_main_process and checkpoint in self.checkpoints()])
        is_first = accelerator.is_main_process if self.is_disk_shared else accelerator.is_local_main_process
        with as_run_error(f"{self.url}: "), local_main_process_first(accelerator):  # without a timeout
            if is_there and is_first:
                remove_incomplete(checkpoint.parent)
                incomplete = incomplete_path(checkpoint)
                new_folder(incomplete)
                self._fs.get(f"{self._root}/{checkpoint.name}/*", f"{incomplete}/")
                metrics, saved = self._config.folder / "metrics.jsonl", (incomplete / "metrics.jsonl").read_bytes()
                is_continued = metrics.exists() and metrics.read_bytes().startswith(saved)
                # before the checkpoint, which would not be fetched again without its log
                if accelerator.is_main_process and not is_continued:
                    quarantine(metrics)
                    write_text(metrics, saved.decode(errors="replace"))
                discard(checkpoint)
                incomplete.rename(checkpoint)
        if is_there and accelerator.is_main_process:
            say(f"fetched from {self.url}/{checkpoint.name}")

    def copy_in_background(self, checkpoint: Path) -> None:
        """Copy a published checkpoint once the current copy is done, unless a newer one has been published by then."""
        self._copier.apply_async(self._copy_newest, (checkpoint,))

    def _copy_newest(self, checkpoint: Path) -> None:
        self.copying = checkpoint
        try:
            if checkpoint not in list_checkpoints(self._own)[:1]:
                raise RunError(f"{self.url} is slower than the saves")
            self._copy(checkpoint, *manifest(checkpoint))
            say(f"mirrored to {self.url}/{checkpoint.name}")
        except Exception as error:
            say(f"WARNING: {checkpoint} is not in the mirror: {cause(error)}")
        self.copying = None

    def wait(self) -> None:
        """Wait for the copies in the background, as `copy` does. Warn if they hang."""
        try:
            self.copy(self._own)
        except RunError as error:
            say(f"WARNING: the mirror lacks the newest checkpoint: {error}")

    def copy(self, folder: Path, *names: str) -> None:
        """Copy these files of a checkpoint, after what is copied in the background. Wait until it is done.

        Raise a RunError if the mirror accepts nothing for half of timeout_minutes; the copy then continues unattended.
        """
        done, accepted = self._copier.apply_async(self._copy, (folder, *names)), -1
        while not done.ready():
            if accepted == self._accepted.value:
                raise RunError(
                    f"{self.url} accepted nothing for half of timeout_minutes={self._config.timeout_minutes:g}"
                )
            accepted = self._accepted.value
            done.wait(30 * self._config.timeout_minutes)
        done.get()

    def _copy(self, folder: Path, *names: str) -> None:
        """Copy these files. If the checkpoint has its manifest by now, complete it: add metrics.jsonl as it was then,
        and the manifest, and delete superfluous checkpoints."""
        there = f"{self._root}/{folder.name.removeprefix(INCOMPLETE)}"
        for name in names:
            self._fs.put_file(f"{folder}/{name}", f"{there}/{name}", callback=self._accepted)
            self._accepted.relative_update()  # not all file systems report parts of a file
        if not (folder / MANIFEST).exists():
            return  # without a shared disk, other processes still copy theirs
        for name in manifest(folder):
            if not self._fs.exists(f"{there}/{name}"):
                raise OSError(f"{name} is missing in {self.url}: all machines need the same mirror")
        state = read_state(folder)
        metrics = (self._config.folder / "metrics.jsonl").read_bytes()
        self._fs.pipe_file(f"{there}/metrics.jsonl", metrics[: state.metrics_bytes])
        self._fs.put_file(f"{folder}/{MANIFEST}", f"{there}/{INCOMPLETE}")
        self._fs.mv(f"{there}/{INCOMPLETE}", f"{there}/{MANIFEST}")  # whole or not at all
        complete = self.checkpoints()
        kept = chosen(complete, self._config.checkpoint, state.progress.evaluations)
        for checkpoint in self.checkpoints(having="*"):
            if checkpoint in kept:
                continue
            old = f"{self._root}/{checkpoint.name}"
            if checkpoint in complete:  # first, or the rest would count as a checkpoint
                self._fs.rm_file(f"{old}/{MANIFEST}")
            self._fs.rm(old, recursive=True)
