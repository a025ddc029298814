"""Find the checkpoint that a run resumes from, and restore the run from it."""

import sys
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

from accelerate import Accelerator
from accelerate.utils import broadcast_object_list, set_seed
from torch import nn

from src.checkpoint.compatibility import note_changes, read_state, require_full_log, require_same_origin
from src.checkpoint.files import parent_checkpoint, remove_incomplete, saved_settings
from src.checkpoint.integrity import Damaged, quarantine
from src.checkpoint.output_dir import folder_errors, lock_run
from src.checkpoint.rng import random_file, restore_random_state
from src.checkpoint.status import answer_at_start
from src.checkpoint.store import Store
from src.checkpoint.tensors import frozen_norm, load_tensors
from src.config.config import Config
from src.config.environment import command_with
from src.config.errors import UserError, raise_if_any
from src.config.settings import Change, flatten, setting_fields
from src.distributed.accelerator import RunSetup
from src.tasks.base import Examples, Task
from src.training.progress import Progress
from src.training.run import Run
from src.training.state import ResumePoint, RunInputs


def origin_of(
    config: Config[Task],
    launch: RunSetup,
    accelerator: Accelerator,
    model: nn.Module,
    train_set: Examples,
    fingerprints: list[str],
) -> RunInputs:
    """Return what the run is made from. Collective."""
    return RunInputs(
        settings=config.model_dump(mode="json"),
        examples=len(train_set),
        schedule_steps=config.schedule_steps(len(train_set)),
        fingerprints=fingerprints,
        data_state=config.task.state.data,
        frozen_norm=frozen_norm(model, accelerator),
        strategy=launch.strategy,
        precision=launch.precision,
        num_processes=launch.num_processes,
        versions={name: version(name) for name in ("torch", "accelerate", "transformers") if find_spec(name)},
    )


def find_checkpoint(store: Store) -> ResumePoint:
    """Find the newest valid checkpoint in the store or else the one to branch off from. Collective.

    Raises:
        UserError: the run must not write into its output folder, no checkpoint is valid, or changed settings make this
            a different run.
    """
    config, is_main = store.config, store.accelerator.is_main_process
    point = ResumePoint()
    if config.mode != "check":
        is_writer = is_main and config.saves
        if is_writer:
            lock_run(config.folder)
        candidates = store.checkpoints() if is_main else []  # only the main process's answer counts
        if is_writer:
            # check again: whoever held the lock may have written there
            raise_if_any(folder_errors(config, candidates))
            remove_incomplete(store.folder)
        if parent := parent_checkpoint(config):
            candidates.append(parent)
        checkpoint, damaged = store.first_valid(candidates if config.resume != "never" else [])
        point = _check_compatible(config, checkpoint, damaged)
        if is_main:
            if checkpoint and (own := point.own_state(config)):
                require_full_log(config, checkpoint, own)
            # only the run's own: the checkpoint that it branches off from is the last candidate
            for path in damaged if config.saves else ():
                quarantine(path)
    if not point.is_finished:
        answer_at_start(config, point, is_main)
    return point


def _check_compatible(config: Config, checkpoint: Path | None, damaged: Damaged) -> ResumePoint:
    """Return what the run resumes from. Collective.

    Raises:
        UserError: all checkpoints are damaged, or this one belongs to a different run.
    """
    command = command_with(sys.argv[1:] + ["--resume=auto"] * (config.resume != "auto"))
    if checkpoint is None:
        if damaged:
            raise UserError(
                *(f"{path}: {why}" for path, why in damaged.items()),
                "no valid checkpoint to resume from: choose another --resume, "
                f"or move {config.folder} away to start over",
            )
        notes = [f"starting over: {config.folder} has no checkpoint yet"] * (config.folder / "metrics.jsonl").exists()
        return ResumePoint(notes=notes, command=command)
    state, has_ended = broadcast_object_list([read_state(checkpoint), _has_ended(config)])
    notes = [f"skipped{' and set aside' * config.saves}: {path}, {why}" for path, why in damaged.items()]
    notes += note_changes(config, checkpoint, state.origin)
    then = dict(flatten(state.origin.settings))
    if any(then.get(f"early_stopping.{name}") != getattr(config.early_stopping, name) for name in ("metric", "mode")):
        state.progress.best = None
        state.progress.evaluations_without_gain = 0
    point = ResumePoint(checkpoint=checkpoint, state=state, notes=notes, command=command)
    point.is_finished = has_ended and point.own_state(config) is not None
    return point


def load_checkpoint(run: Run) -> None:
    """Seed this process's random number generators. If there is a checkpoint, restore weights, optimizer state and
    generators from it. Collective.

    Raises:
        UserError: the checkpoint does not fit this model, or was trained on different data.
    """
    checkpoint, saved, step = run.resume.checkpoint, run.resume.state, run.progress.step
    # The model was built from the same seed everywhere. From here on each process draws its own random numbers, such as
    # dropout masks. (numpy's seeds are below 2**32.)
    set_seed((run.config.seed + step + run.rank) % 2**32)
    if not (checkpoint and saved):
        return
    if step > run.total_steps:
        raise UserError(
            f"{checkpoint} already has {step} steps, but "
            f"epochs={run.config.epochs} and max_steps={run.config.max_steps} make {run.total_steps}"
        )
    if run.is_fp16 and saved.origin.precision != "fp16":
        run.progress.loss_scale = Progress.loss_scale
    run.resume.notes += require_same_origin(checkpoint, saved.origin, run.origin, run.config.checkpoint.accept_changes)
    load_tensors(checkpoint, run.model, run.optimizers)
    # each process has its own dropout masks, which depend on the number of processes
    if saved.origin.num_processes == run.world_size:
        restore_random_state(checkpoint / random_file(run.rank), run.device)


def _has_ended(config: Config) -> bool:
    """Return whether the run has reached the end that is now asked for, and has exported its model."""
    then, now = (dict(flatten(values)) for values in (saved_settings(config.folder), config.model_dump(mode="json")))
    is_there = all((config.folder / name).exists() for name in ("summary.json", "model"))
    return is_there and all(
        then.get(name) == now.get(name) for name, _, marks in setting_fields(type(config)) if Change.REOPENS in marks
    )
