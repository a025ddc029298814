"""What makes a run another one than the checkpoint's: other settings, other data, a record that lacks a part."""

import contextlib
import json
from collections.abc import Mapping
from functools import reduce
from operator import getitem
from pathlib import Path
from typing import Any

from src.config.config import Config
from src.config.errors import UserError
from src.config.settings import Change, fields, marked
from src.training.state import RunState

LENGTH_SETTINGS = marked(Config, Change.LENGTH)
"""Settings that say how long a run is."""
OR_ACCEPT_CHANGES = "or continue anyway with --checkpoint.accept_changes=true"


def changed_settings(config: Config, saved: dict[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Return the settings that make this a different run from the saved one, as (then, now) by name, including
    max_steps and epochs, which say how long it is."""
    now, changed = config.model_dump(mode="json"), {}
    for name, _, marks in fields(type(config)):
        if Change.SAFE in marks:
            continue
        with contextlib.suppress(KeyError, TypeError):  # another version of the code did not have it
            before, after = (reduce(getitem, name.split("."), values) for values in (saved, now))
            if before != after:
                changed[name] = before, after
    return changed


def note_changes(config: Config, checkpoint: Path, state: RunState) -> list[str]:
    """Return a line that names the changed settings, or none; raise a UserError if some make it a different run, unless
    that was accepted."""
    changed = changed_settings(config, state.config)
    saved = config.model_copy(update={name: state.config[name] for name in (*LENGTH_SETTINGS, "global_batch_size")})
    before, after = (of.steps(of.steps_per_epoch(state.examples))[1] for of in (saved, config))
    is_shorter = after < before and not changed.keys().isdisjoint(LENGTH_SETTINGS)
    wrong = {name: pair for name, pair in changed.items() if is_shorter or name not in LENGTH_SETTINGS}
    shorter = f" (the learning rate's schedule then spans {after} steps, not {before})" if is_shorter else ""
    if wrong and not config.checkpoint.accept_changes:
        advice = f"set them back, choose another --run_name, {OR_ACCEPT_CHANGES}"
        raise UserError(f"{checkpoint} is of a run with other settings: {differences(wrong)}{shorter}; {advice}")
    return [f"changed since: {differences(changed)}{shorter}"] if changed else []


def require_same_data(checkpoint: Path, then: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    """Raise a UserError if the data are not those that the checkpoint was trained on. `then` and `now` come from
    `checkpoint_metadata`."""
    both = [
        {
            "examples to train on": of["examples"],
            **of["data_state"],  # room: text examples
        }
        for of in (then, now)
    ]
    # as they come back from a checkpoint, with a tuple as a list; and as text, NaN equals NaN
    known, facts = (json.loads(json.dumps(facts), parse_constant=str) for facts in both)
    changes = differences({name: (known.get(name, value), value) for name, value in facts.items()})
    parts = zip(("to train on", "to evaluate on"), then["data"], now["data"], strict=False)
    changed = " and ".join(part for part, before, after in parts if before != after)
    if changes or changed:
        found = changes or f"other text, images or labels {changed}"
        advice = f"bring them back, choose another --run_name, {OR_ACCEPT_CHANGES}"
        raise UserError(f"{checkpoint} is of a run with other data: {found}: {advice}")


def require_whole_record(config: Config, checkpoint: Path, state: RunState) -> None:
    """Raise a UserError if metrics.jsonl, which the run would append to, lacks a part of what it wrote."""
    record = config.folder / "metrics.jsonl"
    size = record.stat().st_size if record.exists() else 0
    if size < state.metrics_bytes and not config.checkpoint.accept_changes:
        raise UserError(
            f"{record} has {size:,} bytes, and had {state.metrics_bytes:,} when {checkpoint} was saved: bring it back, "
            f"{OR_ACCEPT_CHANGES}"
        )


def note_versions(saved: RunState, now: Mapping[str, Any]) -> list[str]:
    """Return a line that names the libraries, and the precision, that are not those of the checkpoint, or none."""
    pairs = {name: (saved.versions.get(name), version) for name, version in now["versions"].items()}
    pairs["precision"] = saved.precision, now["precision"]
    changes = differences(pairs)
    return [f"changed since: {changes}: what follows differs by rounding"] if changes else []


def differences(pairs: Mapping[str, tuple[Any, Any]]) -> str:
    """Return the pairs of (then, now) that differ, by name, in one line; empty if none do."""
    return ", ".join(f"{name} {json.dumps(a)} -> {json.dumps(b)}" for name, (a, b) in pairs.items() if a != b)
