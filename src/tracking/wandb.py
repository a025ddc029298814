"""Log a run to Weights & Biases: online, or into files that `wandb sync` uploads.

Importing wandb takes half a second: it is imported where it is used, by the process that logs.
"""

import base64
import contextlib
import inspect
import io
import logging
import os
import shlex
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import psutil
from PIL import Image

from src.checkpoint.files import list_checkpoints, step_of
from src.config.settings import write_yaml
from src.config.terminal import BIN
from src.config.wandb import Keep
from src.tasks.base import PICTURE
from src.tracking.guarded import TrackerPart, guarded
from src.tracking.part import Entry, Tables


class WandbPart(TrackerPart):
    """Logs a run to W&B."""

    tracker, title = "wandb", "W&B"

    def is_on(self) -> bool:
        return super().is_on() and self._run.config.wandb.chosen_mode != "disabled"

    def start(self) -> None:
        """Start or, by its id, resume the run; offline if online fails."""
        logging.raiseExceptions = False  # W&B's log on a full disk: 30 lines for each record that cannot be written
        logging.getLogger("opentelemetry.sdk").setLevel(logging.ERROR)  # W&B shuts it down twice on Python 3.14
        for name in [name for name, value in os.environ.items() if name.startswith("WANDB_") and not value]:
            del os.environ[name]  # which W&B would refuse
        self._logged: set[Path] = set()  # checkpoints
        wandb = self._wandb = import_module("wandb")
        config = self._run.config
        mode, why = config.wandb.chosen_mode, "as set"
        defaults = {
            "WANDB_SAVE_CODE": "true",
            "WANDB_PROJECT": "accelerate-template",
            "WANDB_NAME": config.run_name,
            "WANDB_DIR": str(config.folder),
        }
        os.environ |= defaults | os.environ  # what is set stays
        init = partial(
            wandb.init,
            # what is None has the value of its environment variable
            **config.wandb.model_dump(exclude={"mode", "model", "checkpoints"}),
            id=self._id,
            resume="allow",
            config=self.tracked_config(),
            settings=wandb.Settings(silent=True, finish_timeout=120.0, finish_timeout_raises=True),
        )
        try:
            if mode == "auto" and not wandb.login(prompt=False, verify=False):
                mode, why = "offline", f"no credentials: `{BIN}wandb login` for online"
            run = init(mode=mode.replace("auto", "online"))
        except wandb.errors.Error as error:
            why = f"could not go online: {str(error).splitlines()[0]}"
            wandb.teardown()  # frees the id
            run = init(mode="offline")
        self._wandb_run = run
        if run.settings.save_code:
            code = wandb.Artifact(f"code-{self._id}", "code")
            code.add_file(inspect.getfile(type(config.task)))
            with code.new_file("config.yaml") as file:
                file.write(write_yaml(self._run.origin.settings))
            run.log_artifact(code)
        if run.offline:  # without a URL, and asking for it warns
            self.where = f"offline ({why})"
            there = f"{shlex.quote(run.settings.wandb_dir)}/offline-run-*-{shlex.quote(self._id)}"
            self.closing = f"  upload     {BIN}wandb sync {there}"
        else:
            self.where, self.closing = str(run.url), f"  W&B        {run.url}"
        run.define_metric("step", hidden=True)
        run.define_metric("*", step_metric="step")  # W&B's own counter would drop steps after a resume

    def log(self, entry: Entry, tables: Tables) -> None:
        content = {**entry}
        for name, rows in tables.items():
            cells = [[self._cell(row, value) for value in row.values()] for row in rows]
            table = content[name] = self._wandb.Table(columns=[*rows[0]], data=cells)
            # pictures once more, for a panel of them with a slider over the steps
            for column in rows[0]:
                if images := [cell for cell in table.get_column(column) if isinstance(cell, self._wandb.Image)]:
                    content[f"{name}/{column}"] = images
        self._wandb_run.log(content)
        self._save_checkpoints()

    def end(self, summary: Entry | None, crash: str | None) -> None:
        run, config = self._wandb_run, self._run.config
        self._save_checkpoints()
        if crash:
            run.alert(f"{run.name}: crash", crash)
        elif summary:
            self._save_folder(config.folder / "model", "model", config.wandb.model)
            run.summary.update(summary)
        else:
            run.mark_preempting()
        run.finish(exit_code=0 if summary else 1)

    def abandon(self) -> None:
        """Kill W&B's processes: this one could not exit while one of them hangs."""
        for process in psutil.Process().children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess):
                if process.name().startswith(("wandb-core", "gpu_stats")):
                    process.kill()
        with contextlib.suppress(Exception):
            self._wandb.teardown()

    def _save_checkpoints(self) -> None:
        """Log the checkpoints that have appeared since the last call."""
        config = self._run.config
        for checkpoint in reversed(list_checkpoints(config.folder / "checkpoints")):
            if checkpoint not in self._logged:
                self._logged.add(checkpoint)
                with contextlib.suppress(FileNotFoundError, ValueError):  # W&B's: it was deleted meanwhile
                    self._save_folder(checkpoint, "checkpoint", config.wandb.checkpoints, f"step-{step_of(checkpoint)}")

    def _save_folder(self, folder: Path, kind: str, how: Keep, *aliases: str) -> None:
        """Log a folder as an artifact with the alias `latest`."""
        if how == "no":
            return
        artifact = self._wandb.Artifact(f"{kind}-{self._id}", kind)
        if how == "copy":  # upload it from where it is: W&B's own copy would fill the disk
            artifact.add_dir(str(folder), skip_cache=True, policy="immutable")
        else:
            artifact.add_reference(folder.absolute().as_uri(), checksum=False)
        self._wandb_run.log_artifact(artifact, aliases=["latest", *aliases])

    def _cell(self, row: Entry, value: Any) -> Any:
        """Return a value of a row, or a picture, with the row's other cells as its caption."""
        if not str(value).startswith(PICTURE):
            return value
        png = base64.b64decode(value.removeprefix(PICTURE))
        caption = ", ".join(f"{n} {v}" for n, v in row.items() if not str(v).startswith(PICTURE))
        return self._wandb.Image(Image.open(io.BytesIO(png), formats=["PNG"]), caption=caption)


wandb_part = guarded(WandbPart)
