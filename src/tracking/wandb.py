"""A run in Weights & Biases: online, or in files that `wandb sync` uploads.

Importing wandb takes half a second, for which only the processes that record should wait: it is imported at its use.
"""

import base64
import contextlib
import io
import logging
import os
import shlex
import shutil
import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import psutil
from filelock import FileLock
from PIL import Image

from src.checkpoint.folder import list_checkpoints
from src.checkpoint.format import step_of
from src.config.config import Config
from src.config.errors import cause
from src.config.tracking import Keep
from src.tasks.base import PICTURE, Table
from src.tracking.guard import FINISH_SECONDS, Guarded, Record, Recorder, describe
from src.training.run import Run
from src.training.score import score

ARTIFACTS = Path("artifacts")
"""Folder that artifacts are downloaded into, in the current one."""


def fetch_artifacts(config: Config, mistakes: list[str]) -> set[str]:
    """Replace `wandb:entity/project/name:alias` in task.model and resume by the folder of the downloaded artifact.

    The first process of a machine downloads, and the others wait for it. A file NAME.used beside the folder has the
    artifact's name. Where there are mistakes already, nothing is downloaded.

    Args:
        mistakes: a line is added for each artifact that can't be had.

    Returns:
        The names of the settings that were not replaced.
    """
    absent, is_good = set(), not mistakes
    for name, settings in (("task.model", config.task), ("resume", config)):
        field = name.removeprefix("task.")
        written = str(getattr(settings, field, None))
        if written.startswith("wandb:"):
            absent.add(name)
            try:
                if is_good:
                    setattr(settings, field, _download(written.removeprefix("wandb:")))
                    absent.remove(name)
            except Exception as error:  # from W&B, the network or the disk: in any case, it can't be had
                mistakes.append(f"{name}={written}: cannot be downloaded, {cause(error)}")
    return absent


def _download(name: str) -> str:
    wandb = import_module("wandb")
    if not wandb.login(prompt=False, verify=False):
        raise ValueError("no credentials: `wandb login` first")
    artifact = wandb.Api().artifact(name)
    folder = ARTIFACTS / artifact.qualified_name.replace("/", "_")  # with its version in place of an alias
    ARTIFACTS.mkdir(exist_ok=True)
    with FileLock(f"{folder}.lock"):
        if not (used := Path(f"{folder}.used")).exists():
            artifact.download(root=str(folder))
            used.write_text(artifact.qualified_name)
    return str(folder)


def start_wandb(
    run: Run, say: Callable[[str], None], folder: Path | None, machine: int = 0, **arguments: Any
) -> list[Guarded]:
    """Start a run in W&B, unless the settings say otherwise.

    Args:
        say: tells the user that W&B failed.
        folder: the run's output folder; None: it is not this run's, but a check's or another machine's.
        machine: the number of this machine; another one than the first has a run of its own if the settings want it.
        arguments: of wandb.init.
    """
    config, settings = run.config, run.config.wandb
    mode = os.environ.get("WANDB_MODE", "auto") if settings.mode == "auto" else settings.mode
    if "wandb" not in config.trackers or mode == "disabled" or (machine and not settings.machines):
        return []
    arguments = settings.model_dump(exclude={"machines", "model", "checkpoints"}) | arguments
    arguments |= {"name": config.run_name, "config": describe(run)}
    if "parent" in arguments["config"]:
        arguments["tags"] = [*arguments["tags"], "branch"]
    if settings.machines:
        arguments["group"] = settings.group or config.run_name
    if machine:
        arguments |= {"name": f"{config.run_name} machine-{machine}", "job_type": f"machine-{machine}"}
    return [Guarded(WandbRun(run, folder, arguments), say, folder / "wandb" if folder else Path())]


class WandbRun(Recorder):
    """Records in W&B."""

    title = "W&B"

    def __init__(self, run: Run, folder: Path | None, arguments: dict[str, Any]) -> None:
        """Keep what `start` needs; the arguments are those of wandb.init, whose `mode` may be "auto" too."""
        self._config, self._folder, self._arguments = run.config, folder, arguments
        self._evaluations = run.progress.evaluations
        self._run: Any = None
        self._best: dict[str, Record] = {}  # by metric
        self._newest = 0  # step of the newest checkpoint that is recorded
        # the guard says once that the service is gone; asyncio would for each record
        logging.getLogger("asyncio").addFilter(lambda record: record.msg != "socket.send() raised exception.")

    def start(self) -> None:
        """Begin the run, or continue it by its id; go offline if it can't go online."""
        self._wandb = import_module("wandb")
        arguments, why = self._arguments, "as asked"
        if self._folder:
            arguments["dir"] = self._folder
        mode = arguments.pop("mode")
        if mode == "auto":
            mode = None if "WANDB_MODE" in os.environ else "online"
            if mode and not self._wandb.login(prompt=False, verify=False):
                mode, why = "offline", "no credentials: `wandb login` for online"
        arguments["project"] = arguments["project"] or os.environ.get("WANDB_PROJECT", "accelerate-template")
        more = {"finish_timeout": FINISH_SECONDS, "finish_timeout_raises": True, "save_code": True}  # with the git diff
        arguments["settings"] = self._wandb.Settings(silent=True, **more)
        try:
            run = self._wandb.init(mode=mode, **arguments)
        except self._wandb.errors.Error as error:
            why = f"could not go online: {str(error).splitlines()[0]}"
            run = self._wandb.init(mode="offline", **arguments)
        self._run, self.id = run, run.id
        self.where = f"offline ({why})" if run.offline else str(run.url)
        run.define_metric("step", hidden=True)
        run.define_metric("*", step_metric="step")  # wandb's own counter drops steps after a resume
        if self._folder:
            (self._folder / "wandb" / "run_id").write_text(run.id)
            yaml = arguments["config"]["launch"]["config_file"]
            self._save_files(self._folder / "config.yaml", Path(yaml or ""))
        for step, results in self._evaluations.items():  # of earlier sessions
            self._note_best({"step": step, **results})
        for source in (self._config.resume, getattr(self._config.task, "model", None)):
            if (used := Path(f"{source}.used")).exists() and not run.offline:
                run.use_artifact(used.read_text())

    def log(self, record: Record, tables: dict[str, Table]) -> None:
        self._run.log(record | {name: self._table(rows) for name, rows in tables.items()})
        self._note_best(record)
        self._save_checkpoints(record["step"])

    def _note_best(self, record: Record) -> None:
        """Keep the best value of each metric in the summary. A sweep needs the metric's own name there for the last."""
        ranking = self._config.checkpoint
        for name, value in record.items():
            if not name.startswith("eval/") or value is None:
                continue
            mode = ranking.mode if name == ranking.metric else None
            if name not in self._best or score(record[name], name, mode) > score(self._best[name][name], name, mode):
                self._best[name] = record
                self._run.summary[f"best/{name}"] = value

    def summarize(self, summary: Record) -> None:
        self._run.summary.update(summary)

    def alert(self, crash: str) -> None:
        self._run.alert(f"{self._run.name}: crash", crash)

    def mark_stopped(self) -> None:
        self._run.mark_preempting()

    def finish(self, exit_code: int) -> None:
        self._save_checkpoints(sys.maxsize)
        if self._folder and exit_code == 0:
            self._save_files(self._folder / "model" / "chat_template.jinja")
            self._save_folder(self._folder / "model", "model", self._config.wandb.model, [])
        self._run.finish(exit_code=exit_code)

    def abandon(self) -> None:
        """Kill W&B's service, whatever its state: this process could not end while one hangs."""
        logging.getLogger("wandb").handlers = [logging.NullHandler()]  # its file may be on a full disk
        for child in psutil.Process().children():
            if child.name().startswith("wandb-core"):
                for process in (*child.children(recursive=True), child):
                    with contextlib.suppress(psutil.NoSuchProcess):
                        process.kill()
        with contextlib.suppress(Exception):
            self._wandb.teardown()

    def closing_line(self) -> str | None:
        if self._run.offline:
            return f"  upload     wandb sync {shlex.quote(str(Path(self._run.settings.sync_dir)))}"
        return f"  W&B        {self._run.url}"

    def _save_files(self, *files: Path) -> None:
        """Copy those that are there into the run: W&B would link to them, and this run's next session changes some."""
        folder = Path(self._run.dir, "run")
        folder.mkdir(exist_ok=True)
        for file in filter(Path.is_file, files):
            self._run.save(shutil.copy(file, folder), base_path=self._run.dir, policy="now")

    def _save_checkpoints(self, until: int) -> None:
        """Record the checkpoints before the step `until` that have appeared since the last call."""
        how, metric = self._config.wandb.checkpoints, self._config.checkpoint.metric
        if not self._folder or how == "no":
            return
        for checkpoint in reversed(list_checkpoints(self._folder / "checkpoints")):
            step = step_of(checkpoint)
            if self._newest < step < until:
                self._newest = step
                is_best = self._best.get(metric, {}).get("step") == step
                with contextlib.suppress(FileNotFoundError, ValueError):  # W&B's: it was deleted meanwhile
                    aliases = [f"step-{step}", *(["best"] if is_best else [])]
                    self._save_folder(checkpoint, "checkpoint", how, aliases)

    def _save_folder(self, folder: Path, kind: str, how: Keep, aliases: list[str]) -> None:
        """Record a folder as an artifact, which W&B calls `latest` too."""
        if how == "no":
            return
        artifact = self._wandb.Artifact(f"{kind}-{self.id}", kind, metadata={"folder": str(folder.absolute())})
        for file in filter(Path.is_file, sorted(folder.rglob("*"))):
            name = str(file.relative_to(folder))
            if how == "copy":  # uploaded from where it is: a copy of W&B's own would fill the disk
                artifact.add_file(str(file), name, skip_cache=True, policy="immutable")
            else:
                artifact.add_reference(file.absolute().as_uri(), name, checksum=False)
        self._run.log_artifact(artifact, aliases=["latest", *aliases])

    def _table(self, rows: Table) -> Any:
        return self._wandb.Table(columns=list(rows[0]), data=[[self._cell(v) for v in row.values()] for row in rows])

    def _cell(self, value: Any) -> Any:
        if isinstance(value, str) and value.startswith(PICTURE):
            png = base64.b64decode(value.removeprefix(PICTURE))
            return self._wandb.Image(Image.open(io.BytesIO(png)))
        return value
