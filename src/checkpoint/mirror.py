"""Copies of a run's checkpoints in another file system (checkpoint.mirror), from which machines without a shared disk
resume.

    <mirror>/<run_name>/step_00000500/    the checkpoint's files, metrics.jsonl; then manifest.json

A checkpoint in the mirror counts only once its manifest is there. The main process publishes a checkpoint on its disk,
then copies it. A process that does not see that disk copies its own files while saving. At the start, each disk fetches
the checkpoint that it lacks.
"""

import contextlib
import os
import shutil
from collections.abc import Iterator
from datetime import timedelta
from multiprocessing.pool import ThreadPool
from pathlib import Path

from accelerate import Accelerator
from accelerate.utils import broadcast_object_list, gather_object
from fsspec.callbacks import Callback
from fsspec.core import url_to_fs

from src.checkpoint.compatibility import read_state
from src.checkpoint.files import INCOMPLETE, MANIFEST, Json, discard, incomplete_path, new_folder, newest_first, step_of
from src.checkpoint.integrity import manifest, quarantine
from src.checkpoint.store import Store
from src.config.config import Config
from src.config.errors import UserError, as_run_error, as_user_error, cause
from src.config.terminal import say
from src.distributed.accelerator import local_main_process_first
from src.training.progress import Evaluations


class MirroredStore(Store):
    """The checkpoints in a run's output folder and in its mirror, each named by its path in the output folder."""

    def __init__(self, accelerator: Accelerator, config: Config) -> None:
        """Find out whether the machines share a disk. Raise a UserError if they don't share the mirror, or it is not
        writable. Collective."""
        super().__init__(accelerator, config)
        self.url = f"{str(config.checkpoint.mirror).rstrip('/')}/{config.folder_name}"
        probe, is_main = f"{INCOMPLETE}{os.urandom(8).hex()}", accelerator.is_main_process
        with as_user_error(f"checkpoint.mirror={config.checkpoint.mirror}: "):
            self._fs, self._root = url_to_fs(self.url, use_listings_cache=False)
            self._fs.auto_mkdir = True  # for file systems with folders
            if is_main:
                self._fs.pipe_file(f"{self._root}/{probe}", b"probe")
        if is_main:
            (self.folder / probe).mkdir(parents=True)
        (probe,) = broadcast_object_list([probe])
        self._sees_main = (self.folder / probe).exists()
        """Whether this machine has the main process's disk."""
        disks = gather_object([self._sees_main])
        mirrors = gather_object([self._fs.exists(f"{self._root}/{probe}")])
        if is_main:
            (self.folder / probe).rmdir()
            self._fs.rm_file(f"{self._root}/{probe}")
        if not all(mirrors):
            raise UserError(f"checkpoint.mirror={config.checkpoint.mirror}: not the same place on all machines")
        self.is_first = accelerator.is_local_main_process and (is_main or not self._sees_main)
        if not all(disks):
            self.timeout = timedelta(days=1)  # copies take their time
            self.shard = 0, 1  # each process verifies all files
        self.copier = ThreadPool(1)
        """The copying thread. It does not keep the process from ending, even if it hangs."""
        self._copying: Path | None = None
        self._accepted = Callback()
        """Counts the files, or parts of files, that the mirror has accepted."""

    def checkpoints(self) -> list[Path]:
        return newest_first({*super().checkpoints(), *self._mirrored()})

    def _mirrored(self, having: str = MANIFEST) -> list[Path]:
        """Return the checkpoints that have such a file in the mirror, newest first; by default, the complete ones."""
        return newest_first({self.folder / path.split("/")[-2] for path in self._fs.glob(f"{self._root}/*/{having}")})

    def problems(self, checkpoint: Path) -> list[str]:
        """Return what is wrong with a checkpoint, after replacing it with the mirror's if anything was. Collective."""
        if not super().problems(checkpoint):
            return []
        with local_main_process_first(self.accelerator), as_run_error(f"{self.url}: "):
            if self.is_first and checkpoint in self._mirrored():
                self._fetch(checkpoint)
        return super().problems(checkpoint)

    def _fetch(self, checkpoint: Path) -> None:
        """Replace this disk's checkpoint with the mirror's, and the log too, unless the one here continues it."""
        incomplete = incomplete_path(checkpoint)
        new_folder(incomplete)
        self._fs.get(f"{self._root}/{checkpoint.name}/*", f"{incomplete}/")
        log, saved = self.config.folder / "metrics.jsonl", incomplete / "metrics.jsonl"
        is_continued = log.exists() and log.read_bytes().startswith(saved.read_bytes())
        # before the checkpoint, which would not be fetched again without its log
        if self.accelerator.is_main_process and not is_continued:
            quarantine(log)
            shutil.copy(saved, log)
        for stale in [checkpoint] if self._sees_main else super().checkpoints():
            discard(stale)
        incomplete.rename(checkpoint)
        say(f"fetched from {self.url}/{checkpoint.name}")

    def record(self, folder: Path, *names: str) -> Json:
        """Return the manifest's entries of these files. Copy them to the mirror if this machine does not have the main
        process's disk."""
        if not self._sees_main:
            self._put(folder, *names)
        return super().record(folder, *names)

    def rotate(self, evaluations: Evaluations) -> None:
        """Delete the checkpoints that the settings don't keep. Copy the newest once the current copy is done, unless a
        newer one has been published by then."""
        for newest in super().checkpoints()[:1]:
            self.copier.apply_async(self._copy, [newest])
        super().rotate(evaluations)

    def kept(self, checkpoints: list[Path], evaluations: Evaluations) -> list[Path]:
        return super().kept(checkpoints, evaluations) + [path for path in checkpoints if path == self._copying]

    def _put(self, folder: Path, *names: str) -> None:
        """Copy these files of a checkpoint."""
        for name in names:
            there = f"{self._root}/{folder.name.removeprefix(INCOMPLETE)}/{name}"
            self._fs.put_file(f"{folder}/{name}", there, callback=self._accepted)
            self._accepted.relative_update()  # not all file systems report parts of a file

    def wait(self) -> None:
        """Wait for the copies. Give up, with a warning, if the mirror accepts nothing for half of timeout_minutes."""
        done, seen = self.copier.apply_async(int), -1
        while not done.ready() and seen != self._accepted.value:
            seen = self._accepted.value
            done.wait(30 * self.config.timeout_minutes)
        if not done.ready():
            say(f"WARNING: {self.url} accepts nothing, and lacks the newest checkpoint")

    def _copy(self, checkpoint: Path) -> None:
        """Copy a published checkpoint, and delete superfluous ones. A failure is a warning."""
        self._copying, there = checkpoint, f"{self._root}/{checkpoint.name}"
        try:
            if checkpoint != super().checkpoints()[0]:
                raise OSError(f"{self.url} is slower than the saves")
            state = read_state(checkpoint)
            if not self._fs.exists(f"{there}/{MANIFEST}"):
                self._put(checkpoint, *(name for name in manifest(checkpoint) if (checkpoint / name).exists()))
                log = (self.config.folder / "metrics.jsonl").read_bytes()
                self._fs.pipe_file(f"{there}/metrics.jsonl", log[: state.metrics_bytes])
                self._fs.put_file(f"{checkpoint}/{MANIFEST}", f"{there}/{INCOMPLETE}")
                self._fs.mv(f"{there}/{INCOMPLETE}", f"{there}/{MANIFEST}")  # whole or not at all
                say(f"mirrored to {self.url}/{checkpoint.name}")
            kept = super().kept(self._mirrored(), state.progress.evaluations)
            for old in self._mirrored("*"):
                if old not in kept and step_of(old) < step_of(checkpoint):  # others may be copying a newer one
                    self._fs.rm(f"{self._root}/{old.name}", recursive=True)
        except Exception as error:
            say(f"WARNING: {checkpoint} is not in the mirror: {cause(error)}")
        self._copying = None


@contextlib.contextmanager
def mirrored(accelerator: Accelerator, config: Config) -> Iterator[Store]:
    """Open the store of a run, which may have a mirror. Unless the run fails, wait for the copies at the end.
    Collective."""
    if not (config.checkpoint.mirror and config.saves):
        yield Store(accelerator, config)
        return
    store = MirroredStore(accelerator, config)
    with contextlib.closing(store.copier):
        yield store
        store.wait()
