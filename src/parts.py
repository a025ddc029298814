"""The optional parts of the project, and where they join the rest.

A part follows a run (src/tracking/part.py), runs in place of training, or downloads what a setting names.
docs/make-it-yours.md says what each part does and how to leave it out. To log runs elsewhere, add a Part of your own.
"""

import sys
from collections.abc import Callable
from pathlib import Path

from accelerate import Accelerator

from src.check import run_checks
from src.checkpoint.mirror import Mirror
from src.checkpoint.output_dir import folder_errors
from src.checkpoint.store import Store
from src.config.config import Config, load_config
from src.distributed.machines import join
from src.tasks import TASKS
from src.tools.next_step import NextStep
from src.tracking.accelerate_trackers import TensorBoard, Trackio
from src.tracking.guard import guarded
from src.tracking.part import Part, Parts
from src.tracking.report import Report
from src.tracking.summary import dry_run
from src.tracking.wandb import WandbPart, download_artifact
from src.training.run import Run

PARTS: list[Callable[[Run, str], Part]] = [
    # their closing lines are printed in this order
    Report,  # room: report
    NextStep,  # room: tools
    guarded(WandbPart),  # room: wandb
    guarded(Trackio),  # room: trackers
    guarded(TensorBoard),  # room: trackers
]
MODES: dict[str, Callable[..., bool]] = {
    "check": run_checks,  # room: check
    "dry_run": dry_run,
}
"""Functions that run in place of training, by the setting that chooses them: called with run, train_step, evaluate."""
DOWNLOADS: dict[str, Callable[[str], Path]] = {
    # NAME of SCHEME:NAME -> folder
    "wandb": download_artifact,  # room: wandb
}
"""Functions that download a folder, by the scheme of the setting that names it (SCHEME:NAME)."""


def run_settings(argv: list[str] | None = None) -> Config:
    """Return the run's settings, by default from the command line. Raise a UserError that lists all their mistakes."""
    return load_config(sys.argv[1:] if argv is None else argv, TASKS, folder_errors, DOWNLOADS)


def join_machines(config: Config) -> None:
    """On several machines, wait for all of them. Raise a UserError if they are not set up alike."""
    join(config)  # room: machines


def start_parts(run: Run) -> Parts:
    """Start the parts that the settings ask for, and return them."""
    return Parts(run, PARTS)


def open_store(accelerator: Accelerator, config: Config) -> Store:
    """Return the store of the run's checkpoints. Collective."""
    if config.checkpoint.mirror and config.saves:  # room: machines
        return Mirror(accelerator, config)
    return Store(config)
