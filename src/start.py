"""The start of train.py before its imports, which take seconds: catch signals, answer --help and mistakes.

Nothing here imports torch, nor do the settings of tasks that stand in a file of their own.
"""

import gc
import os
from collections.abc import Iterable
from pkgutil import resolve_name
from typing import Any

from src.checkpoint.output_dir import folder_errors
from src.config.config import Config, config_from, read_config
from src.config.errors import as_user_error, raise_if_any
from src.config.settings import DOWNLOADABLE, flatten, marked, nested
from src.config.terminal import is_first, say
from src.distributed.process import SIGNALS, end_with_launcher, exit_codes
from src.tasks import TASKS

DOWNLOADS = {
    # SCHEME: of a setting that is SCHEME:NAME -> function that downloads NAME and returns the folder
    "wandb:": "src.tracking.wandb:download_artifact",  # room: wandb
}


def begin(argv: list[str]) -> Config:
    """Catch signals and the death of the launcher, and return the settings. Exit if `argv` asks for --help, or has
    mistakes."""
    end_with_launcher()
    SIGNALS.catch()
    with exit_codes():
        settings = read_config(argv, TASKS, _place_errors)
    if os.environ.get("WORLD_SIZE", "1") > "1" and is_first():
        say(f"{os.environ['WORLD_SIZE']} processes are starting …")
    gc.disable()  # until main: looking for garbage would take 0.6 s of the 2.3 in which torch is imported
    return settings


def run_settings(argv: list[str], settings: Config | None = None) -> Config[Any]:
    """Return the settings that these arguments ask for, with a Task, and download what they name. `settings` have been
    read already. Raise a UserError that lists all mistakes."""
    settings = settings or read_config(argv, TASKS, _place_errors)
    values = dict(flatten(settings.model_dump()))
    remote = [name for name in marked(type(settings), DOWNLOADABLE) if str(values[name]).startswith(tuple(DOWNLOADS))]
    for name in remote:
        scheme, colon, source = values[name].partition(":")
        with as_user_error(f"{name}={values[name]}: cannot be downloaded, "):
            values[name] = str(resolve_name(DOWNLOADS[scheme + colon])(source))
    config = config_from(nested(values), TASKS)
    if remote:
        raise_if_any([*config.validation_errors(), *folder_errors(config)])
    return config


def _place_errors(settings: Config) -> Iterable[str]:
    return () if settings.resume.startswith(tuple(DOWNLOADS)) else folder_errors(settings)
