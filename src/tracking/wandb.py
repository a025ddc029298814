"""A run in Weights & Biases."""

import base64
import contextlib
import io
import json
import logging
import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import wandb
from PIL import Image

from src.checkpoint.folder import list_checkpoints
from src.checkpoint.format import step_of
from src.config.config import Checkpoint
from src.config.tracking import Keep
from src.tasks.base import PICTURE, Table
from src.tracking.loggers import FINISH_SECONDS, Logger, Record
from src.training.progress import score


class WandbLogger(Logger):
    """Records in W&B: online, or in files that `wandb sync` uploads."""

    title = "W&B"

    def __init__(self, say: Callable[[str], None], model: Keep, checkpoints: Keep, **arguments: Any) -> None:
        """Start the run; go offline if it can't go online. `model` and `checkpoints` say how these are recorded, the
        rest are arguments of wandb.init: `mode` may be "auto" too, `dir` is the run's output folder, absent in a check,
        and `config` has the settings of the run."""
        self.run: Any = None
        self._arguments, self._model, self._checkpoints = arguments, model, checkpoints
        self._ranking = Checkpoint(**arguments["config"]["checkpoint"])
        self._output: Any = arguments.get("dir")
        self._best: dict[str, Record] = {}  # by metric
        self._newest = 0
        # it is reported once, by the logger, that the service is gone, and not by asyncio for each record
        logging.getLogger("asyncio").addFilter(lambda record: record.msg != "socket.send() raised exception.")
        folder, record = (self._output / "wandb", self._output / "metrics.jsonl") if self._output else (Path(), None)
        super().__init__(say, folder, record)

    def start(self) -> None:
        arguments, why = self._arguments, "as asked"
        mode: Any = arguments.pop("mode")
        arguments["tags"] = [*arguments["tags"], *(["branch"] if "parent" in arguments["config"] else [])]
        if mode == "auto":
            mode = None if "WANDB_MODE" in os.environ else "online"
            if mode and not wandb.login(prompt=False, verify=False):
                mode, why = "offline", "no credentials: `wandb login` for online"
        arguments["project"] = arguments["project"] or os.environ.get("WANDB_PROJECT", "accelerate-template")
        more = {"finish_timeout": FINISH_SECONDS, "finish_timeout_raises": True, "save_code": True}  # with the git diff
        arguments["settings"] = wandb.Settings(silent=True, **more)
        try:
            run = wandb.init(mode=mode, **arguments)
        except wandb.errors.Error as error:
            mode, why = "offline", f"could not go online: {str(error).splitlines()[0]}"
            run = wandb.init(mode=mode, **arguments)
        self.run, self.id, self.where = run, run.id, f"offline ({why})" if run.offline else str(run.url)
        run.define_metric("step", hidden=True)
        run.define_metric("*", step_metric="step")  # wandb's own counter drops steps after a resume
        if self._output:
            (self._output / "wandb" / "run_id").write_text(run.id)
            self._save_files(self._output / "config.yaml", Path(arguments["config"]["launch"]["config_file"] or ""))
        for source in (arguments["config"]["resume"], arguments["config"]["task"].get("model")):
            if (used := Path(f"{source}.used")).exists() and not run.offline:
                run.use_artifact(used.read_text())

    def recorded(self) -> Iterator[Record]:
        """Read the files of the run's other sessions, of which a killed service may have lost the end. Of what it was
        to send to the server, only that counts which the server knows of."""
        known = float("inf") if self.run.offline else self.run.summary.get("step", float("inf"))
        for file in sorted(self._output.glob(f"wandb/*run-*-{self.id}/*.wandb")):
            if file.parent.name != Path(self.run.settings.sync_dir).name:
                command = [sys.executable, "-m", "wandb", "leet", "inspect", "--json", str(file.absolute())]
                lines = subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()
                items = (json.loads(line).get("history", {}).get("item", {}) for line in lines)
                yield from (item for item in items if "step" in item and item["step"] <= known)

    def pass_on(self, record: Record, tables: dict[str, Table]) -> None:
        super().pass_on(record, tables)
        for name in (name for name, value in record.items() if name.startswith("eval/") and value is not None):
            mode = self._ranking.mode if name == self._ranking.metric else None
            if name not in self._best or score(record, name, mode) > score(self._best[name], name, mode):
                self._best[name] = record  # a sweep needs the summary's `name` itself: W&B keeps the last there
                self.run.summary[f"best/{name}"] = record[name]
        self._save_checkpoints(record["step"])

    def write(self, record: Record, tables: dict[str, Table]) -> None:
        self.run.log(record | {name: _table(rows) for name, rows in tables.items()})

    def summary(self, summary: Record) -> None:
        self.run.summary.update(summary)

    def alerted(self, crash: str) -> None:
        self.run.alert(f"{self.run.name}: crash", crash)

    def stopped(self) -> None:
        self.run.mark_preempting()

    def end(self, exit_code: int) -> None:
        self._save_checkpoints(sys.maxsize)
        if self._output and exit_code == 0:
            self._save_files(self._output / "model" / "chat_template.jinja")
            if self._model != "no":
                self._save_folder(self._output / "model", "model", self._model, [])
        self.run.finish(exit_code=exit_code)

    def abandon(self) -> None:
        """Kill W&B's service, whatever its state: this process could not end while one hangs."""
        logging.getLogger("wandb").handlers = [logging.NullHandler()]  # its file may be on a full disk
        for child in psutil.Process().children():
            if child.name().startswith("wandb-core"):
                for process in (*child.children(recursive=True), child):
                    with contextlib.suppress(psutil.NoSuchProcess):
                        process.kill()
        with contextlib.suppress(Exception):
            wandb.teardown()

    def closing_line(self) -> str | None:
        if self.run is None or self.failure:
            return None
        if self.run.offline:
            return f"  upload     wandb sync {shlex.quote(str(Path(self.run.settings.sync_dir)))}"
        return f"  W&B        {self.run.url}"

    def _save_files(self, *files: Path) -> None:
        """Copy those that are there into the run: W&B would link to them, and this run's next session changes some."""
        folder = Path(self.run.dir, "run")
        folder.mkdir(exist_ok=True)
        for file in filter(Path.is_file, files):
            self.run.save(shutil.copy(file, folder), base_path=self.run.dir, policy="now")

    def _save_checkpoints(self, until: int) -> None:
        """Record the checkpoints before the step `until` that have appeared since the last call."""
        if not self._output or self._checkpoints == "no":
            return
        for checkpoint in reversed(list_checkpoints(self._output / "checkpoints")):
            if self._newest < (step := step_of(checkpoint)) < until:
                self._newest = step
                is_best = self._best.get(self._ranking.metric, {}).get("step") == step
                with contextlib.suppress(FileNotFoundError, ValueError):  # W&B's: it was deleted meanwhile
                    aliases = [f"step-{step}", *(["best"] if is_best else [])]
                    self._save_folder(checkpoint, "checkpoint", self._checkpoints, aliases)

    def _save_folder(self, folder: Path, kind: str, how: Keep, aliases: list[str]) -> None:
        """Record a folder as an artifact, which W&B calls `latest` too."""
        artifact = wandb.Artifact(f"{kind}-{self.id}", kind, metadata={"folder": str(folder.absolute())})
        for file in filter(Path.is_file, sorted(folder.rglob("*"))):
            name = str(file.relative_to(folder))
            if how == "copy":  # uploaded from where it is: a copy of W&B's own would fill the disk
                artifact.add_file(str(file), name, skip_cache=True, policy="immutable")
            else:
                artifact.add_reference(file.absolute().as_uri(), name, checksum=False)
        self.run.log_artifact(artifact, aliases=["latest", *aliases])


def _table(rows: Table) -> wandb.Table:
    return wandb.Table(columns=list(rows[0]), data=[[_cell(value) for value in row.values()] for row in rows])


def _cell(value: Any) -> Any:
    if isinstance(value, str) and value.startswith(PICTURE):
        return wandb.Image(Image.open(io.BytesIO(base64.b64decode(value.removeprefix(PICTURE)))))
    return value
