"""The optional parts of the project, and where they join the rest.

A part follows a run (src/tracking/part.py), or runs in place of training; src/start.py has what settings can download.
docs/make-it-yours.md says what each part does and how to leave it out. To log runs elsewhere, add a Part of your own.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

from accelerate import Accelerator

from src.check import run_checks
from src.checkpoint.mirror import mirrored
from src.checkpoint.store import Store
from src.config.config import Config
from src.distributed.machines import join
from src.tools.next_step import NextStep
from src.tracking.accelerate_trackers import TensorBoard, Trackio
from src.tracking.guard import guarded
from src.tracking.part import Part, Parts
from src.tracking.report import Report
from src.tracking.summary import dry_run
from src.tracking.wandb import WandbPart
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


def join_machines(config: Config) -> None:
    """On several machines, wait for all of them. Raise a UserError if they are not set up alike."""
    join(config)  # room: machines


def start_parts(run: Run) -> Parts:
    """Start the parts that the settings ask for, and return them."""
    return Parts(run, PARTS)


def open_store(accelerator: Accelerator, config: Config) -> AbstractContextManager[Store]:
    """Open the store of the run's checkpoints. Collective."""
    if config.checkpoint.mirror and config.saves:  # room: machines
        return mirrored(accelerator, config)
    return nullcontext(Store(accelerator, config))
