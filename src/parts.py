"""The parts of the project that a copy may leave out, and where they join the rest.

A part is told what happens to a run (src/tracking/part.py), takes the place of training, or brings what settings name.
docs/make-it-yours.md says what each does, and how to leave it out. To record runs elsewhere, add a Part of your own.
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
from src.tracking.dry_run import dry_run
from src.tracking.guard import guarded
from src.tracking.part import Part, Parts
from src.tracking.report import Report
from src.tracking.wandb import WandbPart, download_artifact
from src.training.run import Run

PARTS: list[Callable[[Run, str], Part]] = [
    # in this order they say, at the end, what they made
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
"""What takes the place of training, by the setting that asks for it: called with the run, train_step and evaluate."""
DOWNLOADS: dict[str, Callable[[str], Path]] = {
    # scheme:rest in a setting
    "wandb": download_artifact,  # room: wandb
}
"""What brings a folder from elsewhere, by the scheme of its name."""


def run_settings(argv: list[str] | None = None) -> Config:
    """Return the settings of the run, by default from the command line; raise a UserError with all their mistakes."""
    return load_config(sys.argv[1:] if argv is None else argv, TASKS, folder_errors, DOWNLOADS)


def join_machines(config: Config) -> None:
    """On several machines, wait for all of them, and raise a UserError if they are not about to do the same."""
    join(config)  # room: machines


def start_parts(run: Run) -> Parts:
    """Tell the parts that the run begins, and return them."""
    return Parts(run, PARTS)


def open_store(accelerator: Accelerator, config: Config) -> Store:
    """Return where the run's checkpoints are. Collective."""
    if config.checkpoint.mirror and config.saves:  # room: machines
        return Mirror(accelerator, config)
    return Store(config)
