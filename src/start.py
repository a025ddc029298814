"""The start of train.py before its imports, which take seconds: catch signals, answer --help and mistakes.

Nothing here imports torch, nor do the settings that SETTINGS names; the mistakes of other tasks are told once it is
imported.
"""

import gc
import os

from src.checkpoint.output_dir import folder_errors
from src.config.config import Config, load_config
from src.config.terminal import is_first, say
from src.distributed.process import SIGNALS, end_with_launcher, exit_codes
from src.tasks import SETTINGS, TASKS

DOWNLOADS = {
    # SCHEME of a setting that is SCHEME:NAME -> function that downloads NAME and returns the folder
    "wandb": "src.tracking.wandb:download_artifact",  # room: wandb
}


def begin(argv: list[str]) -> None:
    """Catch signals and the death of the launcher. Exit if the arguments ask for --help, or have mistakes."""
    end_with_launcher()
    SIGNALS.catch()
    with exit_codes():
        load_config(argv, TASKS | SETTINGS, folder_errors, DOWNLOADS, may_download=False)
    if os.environ.get("WORLD_SIZE", "1") > "1" and is_first():
        say(f"{os.environ['WORLD_SIZE']} processes are starting …")
    gc.disable()  # until main: looking for garbage would take 0.6 s of the 2.3 in which torch is imported


def run_settings(argv: list[str]) -> Config:
    """Return the settings that these arguments ask for. Raise a UserError that lists all their mistakes."""
    return load_config(argv, TASKS, folder_errors, DOWNLOADS)
