"""Weights & Biases before there is a run in it: artifacts that settings name are fetched, and its logger started."""

import os
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

from filelock import FileLock

from src.config.config import Config
from src.config.errors import cause

ARTIFACTS = Path("artifacts")
"""Folder that artifacts are downloaded into, in the current one."""


def fetch_artifacts(config: Config, mistakes: list[str]) -> set[str]:
    """Replace wandb:entity/project/name:alias in task.model and resume by the folder of the downloaded artifact, beside
    which a file NAME.used has its name. The first process of a machine downloads, which the others wait for. Where
    there are mistakes, download nothing; append a line for each that can't be had. Return what was not."""
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


def start_wandb(config: Config, say: Callable[[str], None], /, machine: int = 0, **arguments: Any) -> list[Any]:
    """Import and start the logger of W&B, and return it in a list; an empty list if W&B is disabled, or is not to
    record this machine."""
    settings = config.wandb
    mode = os.environ.get("WANDB_MODE", "auto") if settings.mode == "auto" else settings.mode
    if "wandb" not in config.trackers or mode == "disabled" or (machine and not settings.machines):
        return []
    if settings.machines:
        arguments["group"] = settings.group or arguments["name"]
    if machine:
        arguments |= {"name": f"{arguments['name']} machine-{machine}", "job_type": f"machine-{machine}"}
    fields = settings.model_dump(exclude={"machines"})
    # importing wandb takes half a second, for which only the processes that record have to wait
    return [import_module("src.tracking.wandb").WandbLogger(say, **fields | arguments)]
