"""Which checkpoint a run continues from, and restoring the run to where it was."""

import atexit
import contextlib
import fcntl
import importlib.metadata
import json
import os
import time
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from accelerate import Accelerator
from accelerate.utils import broadcast_object_list, gather_object, set_seed
from torch import nn

from src.checkpoint import format
from src.checkpoint.folder import (
    LENGTH_SETTINGS,
    changed_settings,
    folder_errors,
    list_checkpoints,
    parent_checkpoint,
    saved_settings,
)
from src.checkpoint.mirror import Mirror
from src.checkpoint.rng import absent_random_file, random_file, restore_random_state
from src.checkpoint.tensors import frozen_norm, load_tensors, require_same_frozen
from src.config import terminal
from src.config.config import Config
from src.config.errors import UserError
from src.config.settings import Change, flatten, marked
from src.distributed.accelerator import LIBRARIES, Launch
from src.distributed.process import SIGNALS
from src.training.progress import Progress
from src.training.run import Run
from src.training.state import ResumePoint, RunState

PATIENCE_SECONDS = 40
"""How long a launcher gives its processes to end, and a little more."""
OR_ACCEPT_CHANGES = "or continue anyway with --checkpoint.accept_changes=true"


def checkpoint_metadata(
    config: Config, launch: Launch, examples: int, fingerprints: list[str], accelerator: Accelerator, model: nn.Module
) -> dict[str, Any]:
    """Return the fields of RunState that stay the same throughout a run. The fingerprints, of the data to train and to
    evaluate on, are the main process's. Collective."""
    return {
        "config": config.model_dump(mode="json"),
        "data_state": config.task.data_state(),  # room: text examples
        "examples": examples,
        "data": fingerprints,
        "frozen_norm": frozen_norm(model, accelerator),  # room: text examples
        "strategy": launch.strategy,
        "precision": launch.precision,
        "num_processes": launch.num_processes,
        "versions": {name: importlib.metadata.version(name) for name in LIBRARIES if find_spec(name)},
    }


def find_checkpoint(accelerator: Accelerator, config: Config) -> ResumePoint:
    """Return the newest valid checkpoint of the output folder, or else the one to branch off from; raise a UserError if
    none is valid, or if the settings now make it a different run. Collective."""
    point = ResumePoint()
    if config.check:  # room: check
        return point
    own = config.folder / "checkpoints"
    mirrored: list[Path] = []
    if config.checkpoint.mirror and not config.dry_run:  # room: mirror
        point.mirror = Mirror(accelerator, config, _lock)
    if accelerator.is_main_process and not config.dry_run:
        _lock(config.folder)
        if own.is_symlink() and own.exists():
            _lock(own)  # two runs must not share it
        if point.mirror:  # room: mirror
            mirrored = point.mirror.bring_record()
        if errors := list(folder_errors(config, mirrored)):  # whoever held the lock may have changed what is there
            raise UserError("\n".join(errors))
        format.remove_incomplete(own)
    if config.resume == "never":
        return point
    candidates = list_checkpoints(own)
    if point.mirror:  # room: mirror
        candidates = point.mirror.candidates()
    if parent := parent_checkpoint(config):
        candidates.append(parent)
    checkpoint, damaged = first_valid(
        accelerator,
        candidates,
        point.mirror,  # room: mirror
    )
    if checkpoint is None:
        _require_none_damaged(config, damaged)
        if (config.folder / "metrics.jsonl").exists():
            point.notes.append(f"starting over: {config.folder} has no checkpoint yet")
        return point
    # as the main process sees them: a change to a file system reaches machines at different times
    state, has_ended = broadcast_object_list([format.read_state(checkpoint), _has_ended(config)])
    point.checkpoint, point.state = checkpoint, state
    done = "passed over" if config.dry_run else "passed over and set aside"
    point.notes += [f"{done}: {path}, {why}" for path, why in damaged.items()]
    point.notes += _note_changes(config, checkpoint, state)
    point.is_finished = has_ended and point.is_own(config)
    watched, watches = state.config["early_stopping"], config.early_stopping  # room: best
    if (watched["metric"], watched["mode"]) != (watches.metric, watches.mode):  # room: best
        state.progress.best = None
        state.progress.evaluations_without_gain = 0
    if accelerator.is_main_process:
        if point.is_own(config):
            _require_whole_record(config, checkpoint, state)
            if point.mirror:  # room: mirror
                point.mirror.catch_up(checkpoint, point.is_finished)
        for path in filter(Path.exists, () if config.dry_run else damaged):  # no parent: that is the last candidate
            format.quarantine(path)
    return point


def _require_none_damaged(config: Config, damaged: dict[Path, str]) -> None:
    """Raise a UserError if there are checkpoints, all of them damaged."""
    if damaged:
        lines = [f"{path}: {why}" for path, why in damaged.items()]
        advice = "choose another --resume"
        if (config.folder / "checkpoints").exists():
            advice = f"move {config.folder} away to start over"
        advice += "" if config.checkpoint.mirror else ", or set checkpoint.mirror if the run had one"  # room: mirror
        raise UserError("\n".join([*lines, f"no valid checkpoint to continue from: {advice}"]))


def load_checkpoint(run: Run) -> None:
    """Restore what the run continues from, if there is a checkpoint: weights, optimizer state and random numbers. Raise
    a UserError if it is of another model, or of other data. Collective."""
    checkpoint, saved, now, step = run.resume.checkpoint, run.resume.state, run.metadata, run.progress.step
    if checkpoint is None or saved is None:
        return
    if step > run.total_steps:
        asked = f"epochs={run.config.epochs} and max_steps={run.config.max_steps} make {run.total_steps}"
        raise UserError(f"{checkpoint} has {step} steps already, but {asked}")
    if run.is_fp16 and saved.precision != "fp16":
        run.progress.loss_scale = Progress().loss_scale
    require_same_frozen(checkpoint, saved.frozen_norm, now["frozen_norm"])  # room: text examples
    if not run.config.checkpoint.accept_changes:
        _require_same_data(checkpoint, vars(saved), now)
    versions = {name: (saved.versions.get(name), version) for name, version in now["versions"].items()}
    if changes := _differences({**versions, "precision": (saved.precision, now["precision"])}):
        run.resume.notes.append(f"changed since: {changes}: what follows differs by rounding")
    load_tensors(checkpoint, run.model, run.optimizers)
    set_seed((run.config.seed + step + run.rank) % 2**32)
    if saved.num_processes != run.world_size:
        return  # each process has its own dropout, which cannot continue on another number of them
    if absent := absent_random_file(checkpoint, run.world_size):
        run.resume.notes.append(f"WARNING: {absent}")
    else:
        restore_random_state(checkpoint / random_file(run.rank), run.device)


def first_valid(
    accelerator: Accelerator,
    candidates: list[Path],
    mirror: Any,  # room: mirror
) -> tuple[Path | None, dict[Path, str]]:
    """Return the first whole one of the main process's candidates, and what is wrong with those before it. Collective:
    each process reads its share of the files. What one lacks is fetched from the mirror."""
    damaged: dict[Path, str] = {}
    share = accelerator.process_index, accelerator.num_processes
    for checkpoint in gather_object([candidates])[0]:
        problems = gather_object(list(format.problems(checkpoint, share=share)))
        if mirror:  # room: mirror
            checkpoint, problems = mirror.fetch(checkpoint, problems)
        if not problems:
            return checkpoint, damaged
        damaged[checkpoint] = problems[0]
    return None, damaged


def _lock(folder: Path) -> None:
    """Wait until no other process on this machine writes this run; raise a UserError if one still does after
    PATIENCE_SECONDS. The lock is held until this process ends."""
    if not folder.exists():
        atexit.register(_delete_if_empty, folder)
    folder.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(folder, os.O_RDONLY)
    for second in range(PATIENCE_SECONDS):
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            if SIGNALS.name:  # status.json is the other process's
                SIGNALS.die()
            if second == 0:
                terminal.say(f"{folder}: another process is still writing this run; waiting for it to end")
        except OSError:  # this file system has no locks
            return
        time.sleep(1)
    raise UserError(f"output_dir={folder}: another process is writing this run; stop it, or choose another --run_name")


def _delete_if_empty(folder: Path) -> None:
    """Remove the empty folder that a refused run would leave behind."""
    with contextlib.suppress(OSError):
        folder.rmdir()


def _has_ended(config: Config) -> bool:
    """Return whether the run has reached the end that is asked for now, and its model is there."""
    then, now = (dict(flatten(values)) for values in (saved_settings(config.folder), config.model_dump(mode="json")))
    is_there = all((config.folder / name).exists() for name in ("summary.json", "model"))
    return is_there and all(then.get(name) == now.get(name) for name in marked(type(config), Change.REOPENS))


def _differences(pairs: Mapping[str, tuple[Any, Any]]) -> str:
    """Return the pairs of (then, now) that differ, by name, in one line; empty if none do."""
    return ", ".join(f"{name} {json.dumps(a)} -> {json.dumps(b)}" for name, (a, b) in pairs.items() if a != b)


def _require_whole_record(config: Config, checkpoint: Path, state: RunState) -> None:
    """Raise a UserError if metrics.jsonl, which the run would append to, lacks a part of what it wrote."""
    record = config.folder / "metrics.jsonl"
    size = record.stat().st_size if record.exists() else 0
    if size < state.metrics_bytes and not config.checkpoint.accept_changes:
        raise UserError(
            f"{record} has {size:,} bytes, and had {state.metrics_bytes:,} when {checkpoint} was saved: bring it back, "
            f"{OR_ACCEPT_CHANGES}"
        )


def _require_same_data(checkpoint: Path, then: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    """Raise a UserError if the data are not those that the checkpoint was trained on. `then` and `now` come from
    `checkpoint_metadata`."""
    both: list[dict[str, Any]] = [{"examples to train on": of["examples"]} for of in (then, now)]
    for facts, of in zip(both, (then, now), strict=True):  # room: text examples
        facts.update(of["data_state"])
    # as they come back from a checkpoint, with a tuple as a list; and as text, NaN equals NaN
    known, facts = (json.loads(json.dumps(facts), parse_constant=str) for facts in both)
    changes = _differences({name: (known.get(name, value), value) for name, value in facts.items()})
    parts = zip(("to train on", "to evaluate on"), then["data"], now["data"], strict=False)
    changed = " and ".join(part for part, before, after in parts if before != after)
    if changes or changed:
        found = changes or f"other text, images or labels {changed}"
        advice = f"bring them back, choose another --run_name, {OR_ACCEPT_CHANGES}"
        raise UserError(f"{checkpoint} is of a run with other data: {found}: {advice}")


def _note_changes(config: Config, checkpoint: Path, state: RunState) -> list[str]:
    """Return a line that names the changed settings, or none; raise a UserError if some make it a different run, unless
    that was accepted."""
    changed = changed_settings(config, state.config)
    saved = config.model_copy(update={name: state.config[name] for name in (*LENGTH_SETTINGS, "global_batch_size")})
    before, after = (of.steps(-(-state.examples // of.global_batch_size))[1] for of in (saved, config))
    changes = _differences(changed)
    is_shorter = after < before and not changed.keys().isdisjoint(LENGTH_SETTINGS)
    if is_shorter:
        changes += f" (the learning rate's schedule then spans {after} steps, not {before})"
    if (is_shorter or changed.keys() - LENGTH_SETTINGS) and not config.checkpoint.accept_changes:
        advice = f"set them back, choose another --run_name, {OR_ACCEPT_CHANGES}"
        raise UserError(f"{checkpoint} is of a run with other settings: {changes}; {advice}")
    return [f"changed since: {changes}"] if changes else []
