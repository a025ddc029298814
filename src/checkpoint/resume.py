"""Which checkpoint a run continues from, and restoring the run to where it was."""

from typing import Any

from accelerate import Accelerator
from accelerate.utils import broadcast_object_list, set_seed

from src.checkpoint import format
from src.checkpoint.folder import list_checkpoints, parent_checkpoint, saved_settings
from src.checkpoint.integrity import first_valid, passed_over, quarantine, require_none_damaged
from src.checkpoint.mirror import Mirror
from src.checkpoint.occupied import claim, folder_errors
from src.checkpoint.rng import absent_random_file, random_file, restore_random_state
from src.checkpoint.same_run import note_changes, note_versions, require_same_data, require_whole_record
from src.checkpoint.tensors import load_tensors, require_same_frozen
from src.config.config import Config
from src.config.errors import UserError, refuse
from src.config.settings import Change, flatten, marked
from src.distributed.accelerator import Launch, library_versions
from src.training.progress import Progress
from src.training.run import Run
from src.training.state import ResumePoint


def checkpoint_metadata(
    config: Config,
    launch: Launch,
    examples: int,  # room: safeguards
    fingerprints: list[str],  # room: machines safeguards trackers wandb
    norm: float,  # room: text examples
) -> dict[str, Any]:
    """Return the fields of RunState that stay the same throughout a run. The fingerprints, of the data to train and to
    evaluate on, are the main process's; the norm is that of the frozen parameters."""
    return {
        "config": config.model_dump(mode="json"),
        "data_state": config.task.data_state(),  # room: text examples
        "examples": examples,  # room: safeguards
        "data": fingerprints,  # room: machines safeguards trackers wandb
        "frozen_norm": norm,  # room: text examples
        "strategy": launch.strategy,
        "precision": launch.precision,
        "num_processes": launch.num_processes,
        "versions": library_versions(),  # room: safeguards
    }


def find_checkpoint(accelerator: Accelerator, config: Config) -> ResumePoint:
    """Return the newest valid checkpoint of the output folder, or else the one to branch off from; raise a UserError if
    none is valid, or if the settings now make it a different run. Collective."""
    point = ResumePoint()
    if config.check:  # room: check
        return point
    own = config.folder / "checkpoints"
    if config.checkpoint.mirror and config.saves:  # room: mirror
        point.mirror = Mirror(accelerator, config)
    if accelerator.is_main_process and config.saves:
        claim(config.folder)  # room: safeguards
        if point.mirror:  # room: mirror
            point.mirror.bring_record()
        refuse(  # room: safeguards
            # whoever held the lock may have changed what is there
            folder_errors(
                config,
                point.mirror.at_start if point.mirror else [],  # room: mirror
            )
        )
        config.folder.mkdir(parents=True, exist_ok=True)
        format.remove_incomplete(own)
    if config.resume == "never":
        return point
    candidates = list_checkpoints(own)
    if point.mirror:  # room: mirror
        candidates = point.mirror.candidates()
    if parent := parent_checkpoint(config):
        candidates.append(parent)
    # as the main process sees them: a change to a file system reaches machines at different times
    (candidates,) = broadcast_object_list([candidates])
    checkpoint = next(iter(candidates), None)
    checkpoint, damaged = first_valid(  # room: integrity mirror
        accelerator,
        candidates,
        point.mirror,  # room: mirror
    )
    if checkpoint is None:
        require_none_damaged(config, damaged)  # room: integrity mirror
        if (config.folder / "metrics.jsonl").exists():
            point.notes.append(f"starting over: {config.folder} has no checkpoint yet")
        return point
    state, has_ended = broadcast_object_list([format.read_state(checkpoint), _has_ended(config)])
    point.checkpoint, point.state = checkpoint, state
    point.is_finished = has_ended and point.is_own(config)
    point.notes += passed_over(config, damaged)  # room: integrity mirror
    point.notes += note_changes(config, checkpoint, state)  # room: safeguards
    watched, watches = state.config["early_stopping"], config.early_stopping  # room: best
    if (watched["metric"], watched["mode"]) != (watches.metric, watches.mode):  # room: best
        state.progress.best = None
        state.progress.evaluations_without_gain = 0
    if accelerator.is_main_process and point.is_own(config):  # room: safeguards
        require_whole_record(config, checkpoint, state)
    if accelerator.is_main_process and point.is_own(config) and point.mirror:  # room: mirror
        point.mirror.catch_up(checkpoint, point.is_finished)
    if accelerator.is_main_process and config.saves:  # room: integrity mirror
        # of the run's own: the one that it branches off from is the last candidate
        for path in damaged:
            if path.exists():  # not one that only the mirror has
                quarantine(path)
    return point


def load_checkpoint(run: Run) -> None:
    """Restore what the run continues from, if there is a checkpoint: weights, optimizer state and random numbers. Raise
    a UserError if it is of another model, or of other data. Collective."""
    checkpoint, saved, step = run.resume.checkpoint, run.resume.state, run.progress.step
    if checkpoint is None or saved is None:
        return
    if step > run.total_steps:
        asked = f"epochs={run.config.epochs} and max_steps={run.config.max_steps} make {run.total_steps}"
        raise UserError(f"{checkpoint} has {step} steps already, but {asked}")
    if run.is_fp16 and saved.precision != "fp16":
        run.progress.loss_scale = Progress().loss_scale
    require_same_frozen(checkpoint, saved.frozen_norm, run.metadata["frozen_norm"])  # room: text examples
    if not run.config.checkpoint.accept_changes:  # room: safeguards
        require_same_data(checkpoint, vars(saved), run.metadata)
    run.resume.notes += note_versions(saved, run.metadata)  # room: safeguards
    load_tensors(checkpoint, run.model, run.optimizers)
    set_seed((run.config.seed + step + run.rank) % 2**32)
    if saved.num_processes != run.world_size:
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
