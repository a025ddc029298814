"""Copies of a run's checkpoints elsewhere, by fsspec (checkpoint.mirror): what machines that share no disk go on from.

    <mirror>/<run_name>/step_00000500/    the checkpoint's files, metrics.jsonl, config.yaml; then manifest.json

Nothing counts without its manifest. Where the disks are shared, the main process copies a checkpoint once it is
published. Elsewhere each process copies what it wrote, and the manifest in the mirror publishes it; what was written or
fetched on a machine stays in its `checkpoints` as a part, without a manifest: the next start there need not fetch it.
"""

import contextlib
import json
import os
import re
import shutil
import tempfile
import warnings
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from multiprocessing.pool import ThreadPool
from pathlib import Path
from typing import Any

from accelerate import Accelerator
from accelerate.utils import gather_object
from fsspec.core import url_to_fs

from src.checkpoint import format
from src.checkpoint.folder import LENGTH_SETTINGS, changed_settings, list_checkpoints
from src.checkpoint.format import INCOMPLETE, MANIFEST, RECORD, STATE, file_facts, problems, write_text
from src.config.config import Config
from src.config.errors import RunError, UserError, cause, explained
from src.config.settings import read_yaml
from src.config.terminal import say
from src.training.state import RunState


@cache
def copier() -> ThreadPool:
    """Return this process's thread for copies. One that hangs does not keep the process from ending."""
    return ThreadPool(1)


class Mirror:
    """The copies of one run's checkpoints. A path names a checkpoint, here or there, by its folder here."""

    def __init__(self, accelerator: Accelerator, config: Config, lock: Callable[[Path], None]) -> None:
        """Raise a UserError if nothing can be written there. Where the disks are not shared, `lock` the run's folder on
        the other machines. Collective."""
        self._config, self._own, self._is_main = config, config.folder / "checkpoints", accelerator.is_main_process
        name = config.model_copy(update={"output_dir": "{run_name}"}).folder  # each trial of a sweep has its own
        self.url = f"{str(config.checkpoint.mirror).rstrip('/')}/{name}"
        self._says = f"checkpoint.mirror={config.checkpoint.mirror}: "
        try:
            self._fs, self._root = url_to_fs(self.url)
            if accelerator.is_local_main_process:
                self._put(probe := f"{INCOMPLETE}{os.urandom(8).hex()}", b"probe")
                self._fs.rm_file(f"{self._root}/{probe}")
                self._manifests()
        except Exception as error:  # whatever a file system raises
            install = f": pip install {error.__cause__.name}" if isinstance(error.__cause__, ImportError) else ""
            raise UserError(f"{self._says}{cause(error)}{install}") from error
        self.is_shared, self._is_first = True, self._is_main
        self.copying: Path | None = None
        """The published checkpoint that is being copied."""
        self._waiting = deque[tuple[Path, RunState]](maxlen=1)
        self._of_main = Path(gather_object([str(self._own)])[0])
        if accelerator.num_processes > int(os.environ.get("LOCAL_WORLD_SIZE", "1")):
            self._own.mkdir(parents=True, exist_ok=True)
            with tempfile.NamedTemporaryFile(dir=self._own) as file:
                of_main = self._own / gather_object([Path(file.name).name])[0]
                self.is_shared = all(gather_object([of_main.exists()]))
        if not self.is_shared:
            self._is_first = accelerator.is_local_main_process
            if self._is_first and not self._is_main:
                lock(config.folder)
                self._tidy()
                for path in {*list_checkpoints(self._own)} - {*self._manifests()}:  # another run's
                    format.quarantine(path)

    def candidates(self) -> list[Path]:
        """Return the checkpoints here and there, the newest first; on the main process, on others nothing."""
        here = list_checkpoints(self._own)
        return sorted({*here, *self._manifests()}, key=format.step_of, reverse=True) if self._is_main else []

    def bring_record(self) -> list[Path]:
        """If the newest checkpoint is there, get the run's record, unless this one begins with it, which else is set
        aside. Return the checkpoints there."""
        self._tidy()
        there = list(self._manifests())
        if there and self._config.resume != "never" and there[0] == self.candidates()[0]:
            saved = read_yaml(self._fs.cat_file(self._path(there[0], RECORD[1])))
            changed = changed_settings(self._config, saved).keys() - LENGTH_SETTINGS
            is_here = there[0] in list_checkpoints(self._own)  # what it may accept is then said later
            if changed and not is_here and not self._config.checkpoint.accept_changes:
                which = ", ".join(sorted(changed))
                raise UserError(f"{self.url} holds a run with other settings ({which}): choose another --run_name")
            for file in (self._config.folder / name for name in RECORD):
                content = self._fs.cat_file(self._path(there[0], file.name))
                if file.exists() and file.name == RECORD[0] and not file.read_bytes().startswith(content):
                    say(f"{file} is set aside: it is not the one in {self.url}")
                    format.quarantine(file)
                if not file.exists():
                    write_text(file, content.decode())
        return there

    def here(self, path: Path) -> Path:
        """Return where a path of the main process's is on this machine."""
        return self._own / path.name if path.parent == self._of_main else path

    def fetch(self, checkpoint: Path, lacks: list[str]) -> list[str]:
        """Get what the checkpoint lacks here. Return what it still lacks. Collective."""
        if checkpoint.parent != self._own or (self.is_shared and not lacks):
            return lacks
        with explained(self._says, raises=RunError):
            is_missing = not self.is_shared and self._is_main and checkpoint not in self._manifests()
            if is_missing and not any(problems(checkpoint)):  # a single machine's, which had not copied it yet
                self._copy(checkpoint, format.read_state(checkpoint))
            files = self._manifests().get(checkpoint) if self._is_main else None  # others might see less of it
        files = gather_object([files])[0]
        with explained(self._says, raises=RunError):
            is_there = files and self._is_first
            found = list(self._fetch(checkpoint, files)) if is_there else [*lacks, "not in the mirror"]
        found = gather_object(found if self._is_first else [])
        if self._is_main and not found:
            say(f"fetched from {self.url}/{checkpoint.name}")
        elif self._is_main and files:  # it must not count when some of its files have been written anew
            self._fs.mv(self._path(checkpoint, MANIFEST), self._path(checkpoint, f"damaged_{MANIFEST}"))
        return found

    def _fetch(self, checkpoint: Path, files: dict[str, Any]) -> Iterator[str]:
        """Yield what is wrong with it there."""
        if self.is_shared and (checkpoint / MANIFEST).exists():
            format.quarantine(checkpoint)
        checkpoint.mkdir(parents=True, exist_ok=True)
        for path in checkpoint.iterdir():
            if path.name not in files:
                path.unlink()
        for name, facts in files.items():
            here, there = checkpoint / name, self._path(checkpoint, name)
            if here.is_file() and here.stat().st_size == facts["bytes"] and file_facts(here) == facts:
                continue
            try:
                self._fs.get_file(there, str(here))
                if file_facts(here) != facts:
                    yield f"{name} in the mirror has changed since it was saved"
            except FileNotFoundError:
                yield f"{name} in the mirror is missing"
        if self.is_shared:
            format.write_json(checkpoint / MANIFEST, {"files": files})

    def start(self, checkpoint: Path, state: RunState) -> None:
        """Copy a published checkpoint in the background, after the one that is being copied. Only the newest waits for
        that: it takes the place of another one."""
        for replaced, _ in list(self._waiting):
            say(f"WARNING: {replaced} is not in the mirror: {self.url} takes longer than from save to save")
        self._waiting.append((checkpoint, state))
        copier().apply_async(self._copy_newest)

    def _copy_newest(self) -> None:
        while self._waiting:
            self.copying, state = self._waiting.pop()
            try:
                self._copy(self.copying, state)
                say(f"mirrored to {self.url}/{self.copying.name}")
            except Exception as error:
                say(f"WARNING: {self.copying} is not in the mirror: {cause(error)}")
            self.copying = None

    def wait(self) -> None:
        """Wait for what is being copied, as long as `patiently` does."""
        try:
            self.patiently(bool)
        except RunError as error:
            say(f"WARNING: the mirror lacks the newest checkpoint: {error}")

    def patiently(self, work: Callable[..., object], *arguments: Any) -> None:
        """Do it in the background, after what was begun there, and wait for half of timeout_minutes: for all of it, the
        other processes wait for this one. Raise a RunError if it isn't done then: it is left behind."""
        work_done = copier().apply_async(work, arguments)
        work_done.wait(30 * self._config.timeout_minutes)
        if not work_done.ready():
            raise RunError(f"{self.url} takes more than half of timeout_minutes={self._config.timeout_minutes:g}")
        work_done.get()

    def _copy(self, checkpoint: Path, state: RunState) -> None:
        files = json.loads((checkpoint / MANIFEST).read_text())["files"]
        self.put(checkpoint, files.keys() - {STATE})
        self.complete(checkpoint, state, files)

    def put(self, checkpoint: Path, files: Iterable[str]) -> None:
        """Copy these files; delete parts that are no longer of use."""
        for name in files:
            self._put(f"{checkpoint.name}/{name}", checkpoint / name)
        self._tidy(checkpoint)

    def complete(self, checkpoint: Path, state: RunState, files: dict[str, Any]) -> None:
        """Copy the run's record as it was then, add the manifest, and delete what is not to be kept."""
        self.put(checkpoint, [STATE])
        for name, facts in files.items():
            there = self._path(checkpoint, name)
            if not self._fs.exists(there) or self._fs.size(there) != facts["bytes"]:
                raise OSError(f"{name} is not in {self.url} as it was written: all machines must see the same mirror")
        contents = {name: (self._config.folder / name).read_bytes() for name in RECORD}
        contents[RECORD[0]] = contents[RECORD[0]][: state.metrics_bytes]
        for name, content in (contents | {MANIFEST: json.dumps({"files": files}).encode()}).items():
            self._put(f"{checkpoint.name}/{name}", content)
        try:
            whole = self._manifests()
            kept = whole.keys() - format.superfluous(list(whole), self._config.checkpoint, state.progress.evaluations)
            for path in self._steps() - kept:
                if path in whole:  # first, or a part of it would count
                    self._fs.rm_file(self._path(path, MANIFEST))
                self._fs.rm(self._path(path), recursive=True)
        except Exception as error:  # in any case, the new one is there
            warnings.warn(f"old checkpoints in {self.url} could not be deleted: {error}", stacklevel=1)

    def _tidy(self, unfinished: Path | None = None) -> None:
        """Delete what crashes left behind, and the parts here of checkpoints that the mirror does not have."""
        if self._is_first and not self.is_shared:
            format.remove_incomplete(self._own)
            there = self._manifests()
            for path in {*list_checkpoints(self._own)} - {unfinished, *there}:
                if not (path / MANIFEST).exists():
                    (shutil.rmtree if there or unfinished else format.quarantine)(path)

    def _path(self, checkpoint: Path, name: str = "") -> str:
        return f"{self._root}/{checkpoint.name}/{name}".rstrip("/")

    def _steps(self) -> set[Path]:
        self._fs.invalidate_cache()
        try:
            names = [Path(path).name for path in self._fs.ls(self._root, detail=False)]
        except FileNotFoundError:
            return set()
        return {self._own / name for name in names if re.fullmatch(r"step_\d{8,}", name)}

    def _manifests(self) -> dict[Path, dict[str, Any]]:
        """Return the facts about the files of each whole checkpoint there, the newest first."""
        found = {}
        for checkpoint in sorted(self._steps(), key=format.step_of, reverse=True):
            with contextlib.suppress(FileNotFoundError, ValueError, LookupError, TypeError, AttributeError):
                files = json.loads(self._fs.cat_file(self._path(checkpoint, MANIFEST)))["files"]
                if all(Path(name).name == name for name in files):  # nor is a path that leads elsewhere
                    found[checkpoint] = files
        return found

    def _put(self, name: str, content: bytes | Path) -> None:
        path, has_folders = f"{self._root}/{name}", hasattr(self._fs, "auto_mkdir")
        if has_folders:  # unlike a bucket
            self._fs.makedirs(path.rpartition("/")[0], exist_ok=True)
        if isinstance(content, Path):
            self._fs.put_file(str(content), path)
        elif has_folders:  # whole or not at all
            self._fs.pipe_file(f"{path}.tmp", content)
            self._fs.mv(f"{path}.tmp", path)
        else:
            self._fs.pipe_file(path, content)
