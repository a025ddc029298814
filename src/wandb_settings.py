"""The settings of Weights & Biases, apart from its logger, whose import takes half a second."""

import os
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any, Literal

from filelock import FileLock

from src.process import cause
from src.settings import Settings

ARTIFACTS = Path("artifacts")
"""Folder that artifacts are downloaded into, in the current one."""

Keep = Literal["no", "reference", "copy"]


class Wandb(Settings):
    """Weights & Biases. Its own WANDB_* environment variables work too."""

    mode: Literal["auto", "online", "offline", "disabled"] = "auto"
    """auto: WANDB_MODE, else online where there are credentials, else offline."""
    project: str | None = None
    """Project that the run is filed under; null: WANDB_PROJECT, else accelerate-template."""
    entity: str | None = None
    """User or team that owns the project; null: WANDB_ENTITY, else the account's default."""
    tags: list[str] = []
    """Labels to find the run by."""
    group: str | None = None
    """Runs that belong together have the same group; null: WANDB_RUN_GROUP."""
    job_type: str | None = None
    """What the run is for, such as train; null: WANDB_JOB_TYPE."""
    notes: str | None = None
    """What to remember about the run; null: WANDB_NOTES."""
    model: Keep = "reference"
    """Record the exported model as an artifact that names its files, or with a copy of them, or no such artifact."""
    checkpoints: Keep = "no"
    """Record each checkpoint likewise, with the aliases latest, best and step-N."""
    machines: bool = False
    """Record the system metrics of the other machines too, each in a run of its own in the same group."""

    @staticmethod
    def download(config: Any, mistakes: list[str]) -> set[str]:
        """Replace wandb:entity/project/name:alias in task.model and resume by the folder of the downloaded artifact,
        beside which a file NAME.used has its name. The first process of a machine downloads, which the others wait for.
        Where there are mistakes, download nothing; append a line for each that can't be had. Return what was not."""
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

    def start(self, say: Callable[[str], None], /, machine: int = 0, **arguments: Any) -> list[Any]:
        """Import and start the logger, and return it in a list; an empty list if W&B is disabled, or is not to record
        this machine."""
        is_disabled = "disabled" in (self.mode, self.mode == "auto" and os.environ.get("WANDB_MODE"))
        if is_disabled or (machine and not self.machines):
            return []
        if self.machines:
            arguments["group"] = self.group or arguments["name"]
        if machine:
            arguments |= {"name": f"{arguments['name']} machine-{machine}", "job_type": f"machine-{machine}"}
        settings = self.model_dump(exclude={"machines"})
        return [import_module("src.wandb_logger").WandbLogger(say, **settings | arguments)]


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
