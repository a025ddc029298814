"""The optional parts of the project, and where they join the rest.

A part follows a run (src/tracking/part.py), runs in place of training or before it, or keeps its checkpoints. To log
runs elsewhere, add a Part of your own.
"""

from collections.abc import Callable

from src.check import run_checks
from src.checkpoint.hub import push_to_hub
from src.checkpoint.mirror import mirrored
from src.checkpoint.store import local_store
from src.config.config import Config
from src.distributed.machines import join
from src.tracking.accelerate_trackers import accelerate_parts
from src.tracking.next_step import NextStep
from src.tracking.part import Part
from src.tracking.performance import measure
from src.tracking.report import Report
from src.tracking.summary import dry_run
from src.tracking.wandb import wandb_part
from src.training.batches import Fetched, TrainStep
from src.training.cuda_graph import capture, require_one_gpu
from src.training.run import Run

PARTS: list[Callable[[Run, str], Part]] = [
    # their closing lines are printed in this order
    Report,
    NextStep,
    wandb_part,
    *accelerate_parts,
]
MODES: dict[str, Callable[..., bool]] = {
    "check": run_checks,
    "dry_run": dry_run,
}
"""Functions that run in place of training, by the setting that chooses them: called with run, train_step, evaluate."""
AT_START: list[Callable[[Config], None]] = [
    # functions that run before the processes join: called with the settings
    join,
    require_one_gpu,
]
AROUND_STEPS: list[Callable[[Run, Fetched, TrainStep], tuple[Fetched, TrainStep]]] = [
    # functions that wrap the iterator over steps, and train_step: the last is the outermost
    capture,
    measure,
]
AT_END: list[Callable[[Config], None]] = [
    # functions that the main process runs after the end of a finished run: called with the settings
    push_to_hub,
]
open_store, *_ = (
    # the first opens the store of a run's checkpoints
    mirrored,
    local_store,
)
