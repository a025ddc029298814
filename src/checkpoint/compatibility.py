"""Whether a run may resume from a checkpoint, or settings, data or metrics.jsonl make it a different run."""

import json
import math
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from src.checkpoint.files import STATE, read_json, reading
from src.config.config import LENGTH_SETTINGS, Config, changed_settings
from src.config.errors import UserError
from src.training.state import FORMAT_VERSION, RunInputs, RunState

OR_ACCEPT_CHANGES = "or resume anyway with --checkpoint.accept_changes=true"
RUN_STATE = TypeAdapter(RunState)


def read_state(checkpoint: Path) -> RunState:
    """Return a checkpoint's state.json. Raise a UserError if it has another format version, a RunError if it is
    damaged."""
    content = read_json(file := checkpoint / STATE)
    with reading(file):
        version = content["format_version"]
        if version == FORMAT_VERSION:
            return RUN_STATE.validate_python(content)
    raise UserError(
        f"{checkpoint} has format version {version!r:.9}, but this code reads version {FORMAT_VERSION}: "
        "use the code that saved it, or begin a new run"
    )


def note_changes(config: Config, checkpoint: Path, then: RunInputs) -> list[str]:
    """Return a line about changed settings, if there are any. Raise a UserError if they make this a different run,
    unless that is accepted."""
    changed = changed_settings(config, then.settings)
    before, after = then.schedule_steps, config.schedule_steps(then.examples)
    is_shorter = after < before and changed.keys() & LENGTH_SETTINGS
    wrong = {name: pair for name, pair in changed.items() if is_shorter or name not in LENGTH_SETTINGS}
    shorter = f" (the learning-rate schedule then spans {after} steps, not {before})" if is_shorter else ""
    if wrong and not config.checkpoint.accept_changes:
        raise UserError(
            f"{checkpoint} was saved with different settings: {_changes(wrong)}{shorter}; "
            f"set them back, choose another --run_name, {OR_ACCEPT_CHANGES}"
        )
    return [f"changed since: {_changes(changed)}{shorter}"] if changed else []


def require_same_origin(checkpoint: Path, then: RunInputs, now: RunInputs, accepts_changes: bool) -> list[str]:
    """Return a line about changed library versions and precision, if there are any.

    Raises:
        UserError: the frozen weights have changed, or the data have and that is not accepted.
    """
    require_same_frozen(checkpoint, then.frozen_norm, now.frozen_norm)
    if not accepts_changes:
        require_same_data(checkpoint, then, now)
    pairs = {name: (then.versions.get(name), version) for name, version in now.versions.items()}
    pairs["precision"] = then.precision, now.precision
    changes = _changes(pairs)
    return [f"changed since: {changes}: results will differ by rounding"] if changes else []


def require_same_frozen(checkpoint: Path, then: float, now: float) -> None:
    """Raise a UserError if the norm of the frozen parameters has changed since the checkpoint was saved."""
    if not math.isclose(then, now, rel_tol=1e-6):
        raise UserError(
            f"{checkpoint} belongs to a different base model (norm of frozen weights: {then:.8g}, now {now:.8g}): "
            "name its old version by task.revision, or freeze the same parts"
        )


def require_same_data(checkpoint: Path, then: RunInputs, now: RunInputs) -> None:
    """Raise a UserError if the checkpoint was trained on different data."""
    # in the form that a checkpoint returns: tuples as lists, and NaN as text, which equals itself
    known, facts = (
        json.loads(json.dumps({"examples to train on": of.examples, **of.data_state}), parse_constant=str)
        for of in (then, now)
    )
    changes = _changes({name: (known.get(name, value), value) for name, value in facts.items()})
    parts = zip(("to train on", "to evaluate on"), then.fingerprints, now.fingerprints, strict=False)
    changed = " and ".join(part for part, before, after in parts if before != after)
    if changes or changed:
        found = changes or f"other text, images or labels {changed}"
        raise UserError(
            f"{checkpoint} was trained on different data: {found}: "
            f"bring them back, choose another --run_name, {OR_ACCEPT_CHANGES}"
        )


def require_full_log(config: Config, checkpoint: Path, state: RunState) -> None:
    """Raise a UserError if metrics.jsonl, which the run will append to, was longer when the checkpoint was saved."""
    file = config.folder / "metrics.jsonl"
    size = file.stat().st_size if file.exists() else 0
    if size < state.metrics_bytes and not config.checkpoint.accept_changes:
        raise UserError(
            f"{file} has {size:,} bytes, but had {state.metrics_bytes:,} when {checkpoint} was saved: restore it, "
            f"{OR_ACCEPT_CHANGES}"
        )


def _changes(pairs: dict[str, tuple[Any, Any]]) -> str:
    """Return the (old, new) pairs that differ, by name, in one line; empty if none do."""
    return ", ".join(f"{name} {json.dumps(a)} -> {json.dumps(b)}" for name, (a, b) in pairs.items() if a != b)
