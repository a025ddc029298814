"""Artifacts of Weights & Biases that settings name: `wandb:entity/project/name:alias` in task.model or resume."""

from importlib import import_module
from pathlib import Path

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
