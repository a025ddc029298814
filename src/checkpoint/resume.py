"""Which checkpoint a run continues from, and restoring the run to where it was."""

from pathlib import Path

from accelerate import Accelerator
from accelerate.utils import broadcast_object_list, set_seed
from torch import nn

from src.checkpoint.folder import parent_checkpoint, saved_settings
from src.checkpoint.format import read_state, remove_incomplete
from src.checkpoint.integrity import Damaged, first_valid, passed_over, quarantine, require_none_damaged
from src.checkpoint.occupied import claim, folder_errors
from src.checkpoint.rng import absent_random_file, random_file, restore_random_state
from src.checkpoint.same_run import note_changes, require_same_origin, require_whole_record
from src.checkpoint.status import answer_at_start
from src.checkpoint.store import Store
from src.checkpoint.tensors import frozen_norm, load_tensors
from src.config.config import Config
from src.config.errors import UserError, refuse
from src.config.settings import Change, flatten, marked
from src.distributed.accelerator import Launch, library_versions
from src.distributed.launcher import resume_command
from src.tasks.base import Examples
from src.training.progress import Progress
from src.training.run import Run
from src.training.state import Origin, ResumePoint


def origin_of(
    config: Config,
    launch: Launch,
    accelerator: Accelerator,
    model: nn.Module,
    train_set: Examples,
    fingerprints: list[str],
) -> Origin:
    """Return what a run is made from. Collective."""
    return Origin(
        settings=config.model_dump(mode="json"),
        examples=len(train_set),
        schedule_steps=config.schedule_steps(len(train_set)),
        fingerprints=fingerprints,
        data_state=config.task.state.data,
        frozen_norm=frozen_norm(model, accelerator),
        strategy=launch.strategy,
        precision=launch.precision,
        num_processes=launch.num_processes,
        versions=library_versions(),
    )


def find_checkpoint(accelerator: Accelerator, config: Config, store: Store) -> ResumePoint:
    """Return the newest valid checkpoint of the output folder, or else the one to branch off from. Collective.

    Raises:
        UserError: none is valid, or the settings now make it a different run.
    """
    point = ResumePoint()
    if config.mode != "check":
        if accelerator.is_main_process and config.saves:
            _take_folder(config, store)
        checkpoint, damaged = _choose(accelerator, config, store)
        point = _judge(config, checkpoint, damaged)
        if accelerator.is_main_process:
            _adopt(config, store, point, damaged)
    if not point.is_finished:
        answer_at_start(config, point, accelerator.is_main_process)
    return point


def _take_folder(config: Config, store: Store) -> None:
    """Claim the output folder for this run, and tidy it up; raise a UserError if it must not write there."""
    claim(config.folder)
    # whoever held the lock may have changed what is there
    refuse(folder_errors(config, store.bring_record()))
    config.folder.mkdir(parents=True, exist_ok=True)
    remove_incomplete(config.folder / "checkpoints")


def _choose(accelerator: Accelerator, config: Config, store: Store) -> tuple[Path | None, Damaged]:
    """Return the newest whole checkpoint, and what is wrong with those that are newer. Collective."""
    if config.resume == "never":
        return None, {}
    candidates = store.candidates()
    if parent := parent_checkpoint(config):
        candidates.append(parent)
    # as the main process sees them: a change to a file system reaches machines at different times
    (candidates,) = broadcast_object_list([candidates])
    return first_valid(accelerator, candidates, store)


def _judge(config: Config, checkpoint: Path | None, damaged: Damaged) -> ResumePoint:
    """Return what the run continues from. Collective.

    Raises:
        UserError: it is of a different run, or all checkpoints are damaged.
    """
    command = resume_command(config)
    if checkpoint is None:
        require_none_damaged(config, damaged)
        is_begun = (config.folder / "metrics.jsonl").exists()
        notes = [f"starting over: {config.folder} has no checkpoint yet"] if is_begun else []
        return ResumePoint(notes=notes, command=command)
    state, has_ended = broadcast_object_list([read_state(checkpoint), _has_ended(config)])
    notes = [*passed_over(config, damaged), *note_changes(config, checkpoint, state.origin)]
    watched, watches = state.origin.settings["early_stopping"], config.early_stopping
    if (watched["metric"], watched["mode"]) != (watches.metric, watches.mode):
        state.progress.best = None
        state.progress.evaluations_without_gain = 0
    point = ResumePoint(checkpoint=checkpoint, state=state, notes=notes, command=command)
    point.is_finished = has_ended and point.is_own(config)
    return point


def _adopt(config: Config, store: Store, point: ResumePoint, damaged: Damaged) -> None:
    """Make sure that the record goes with the run's own checkpoint, that a mirror has a copy of it, and that damaged
    ones are not in the way."""
    if point.checkpoint and (own := point.own_state(config)):
        require_whole_record(config, point.checkpoint, own)
        store.catch_up(point.checkpoint, point.is_finished)
    if config.saves:
        # of the run's own: the one that it branches off from is the last candidate
        for path in damaged:
            if path.exists():  # not one that only the mirror has
                quarantine(path)


def load_checkpoint(run: Run) -> None:
    """Seed this process's random numbers. Restore what the run continues from, if there is a checkpoint: weights,
    optimizer state and random numbers. Collective.

    Raises:
        UserError: it is of another model, or of other data.
    """
    checkpoint, saved, step = run.resume.checkpoint, run.resume.state, run.progress.step
    # The model came from one seed; from here on each process draws random numbers, such as dropout masks, of its own.
    # (numpy takes no seed from 2**32 on.)
    set_seed((run.config.seed + step + run.rank) % 2**32)
    if checkpoint is None or saved is None:
        return
    if step > run.total_steps:
        asked = f"epochs={run.config.epochs} and max_steps={run.config.max_steps} make {run.total_steps}"
        raise UserError(f"{checkpoint} has {step} steps already, but {asked}")
    if run.is_fp16 and saved.origin.precision != "fp16":
        run.progress.loss_scale = Progress().loss_scale
    accepts_changes = run.config.checkpoint.accept_changes
    run.resume.notes += require_same_origin(checkpoint, saved.origin, run.origin, accepts_changes)
    load_tensors(checkpoint, run.model, run.optimizers)
    if saved.origin.num_processes != run.world_size:
        return  # each process has its own dropout, which cannot continue on another number of them
    if absent := absent_random_file(checkpoint, run.world_size):
        run.resume.notes.append(f"WARNING: {absent}")
    else:
        restore_random_state(checkpoint / random_file(run.rank), run.device)


def _has_ended(config: Config) -> bool:
    """Return whether the run has reached the end that is asked for now, and its model is there."""
    then, now = (dict(flatten(values)) for values in (saved_settings(config.folder), config.model_dump(mode="json")))
    is_there = all((config.folder / name).exists() for name in ("summary.json", "model"))
    return is_there and all(then.get(name) == now.get(name) for name in marked(type(config), Change.REOPENS))
