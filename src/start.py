"""The start of train.py before its imports, which take seconds: catch signals, answer --help and mistakes.

Nothing here imports torch, nor do the settings of tasks that stand in a file of their own.
"""

import gc
import os
from typing import Any

from src.checkpoint.output_dir import folder_errors
from src.config.config import Config, config_from, read_config
from src.config.terminal import is_first, say
from src.distributed.process import SIGNALS, end_with_launcher, exit_codes
from src.tasks import TASKS


def begin(argv: list[str]) -> Config:
    """Catch signals and the death of the launcher, and return the settings. Exit if `argv` asks for --help, or has
    mistakes."""
    end_with_launcher()
    SIGNALS.catch()
    with exit_codes():
        settings = read_config(argv, TASKS, folder_errors)
    if os.environ.get("WORLD_SIZE", "1") > "1" and is_first():
        say(f"{os.environ['WORLD_SIZE']} processes are starting …")
    # torch reads this once: of tensors from 2 MiB on, the kernel zeroes pages of 2 MiB, not 512 times as many of 4 KiB
    os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")
    gc.disable()  # until main: looking for garbage would take 0.6 s of the 2.3 in which torch is imported
    return settings


def run_settings(argv: list[str], settings: Config | None = None) -> Config[Any]:
    """Return the settings that these arguments ask for, with a Task. `settings` have been read already. Raise a
    UserError that lists all mistakes."""
    return config_from((settings or read_config(argv, TASKS, folder_errors)).model_dump(), TASKS)
