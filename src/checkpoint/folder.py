"""The output folder of a run: reading its files, and which checkpoints it holds."""

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TypeGuard

from ruamel.yaml.error import YAMLError

from src.checkpoint.format import Json, is_checkpoint, step_of
from src.config.config import Config
from src.config.settings import read_yaml


def is_number(value: Any) -> TypeGuard[float]:  # room: report sweep
    """Return whether it is a finite number, not too large for a float."""
    return isinstance(value, int | float) and abs(value) < 1e308


def parse(content: str | bytes) -> Json:
    """Return the JSON object that is written there; an empty one if there is none."""
    try:
        found = json.loads(content)
    except (ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def read_json(file: Path) -> Json:
    """Return the JSON object in a file; an empty one if there is none."""
    return parse(file.read_bytes()) if file.exists() else {}


def read_lines(file: Path) -> Iterator[Json]:  # room: report sweep
    """Yield each record of metrics.jsonl, if it is there: an empty one for a line that is damaged, and none for a last
    one that a kill cut short."""
    with contextlib.suppress(FileNotFoundError), file.open("rb") as stream:
        for line in stream:
            record = parse(line)
            if is_number(record.get("step")):
                yield record
            elif line.endswith(b"\n"):
                yield {}


def list_checkpoints(checkpoints: Path) -> list[Path]:
    """Return the checkpoints in a folder, whole or damaged, the newest first."""
    found = [path for path in checkpoints.glob("step_*") if is_checkpoint(path.name) and path.is_dir()]
    return sorted(found, key=step_of, reverse=True)


def saved_settings(folder: Path) -> Json:
    """Return the settings of the run in an output folder; empty if there are none."""
    try:
        saved = read_yaml((folder / "config.yaml").read_bytes())
    except (OSError, UnicodeDecodeError, YAMLError):
        return {}
    return parse(json.dumps(saved, default=str))


def parent_checkpoint(config: Config) -> Path | None:
    """Return the checkpoint that the run branches off from: by `resume`, or by what its folder says about its start."""
    resume = config.resume if config.resume not in ("auto", "never") else saved_settings(config.folder).get("resume")
    return Path(str(resume)) if resume not in ("auto", "never", None) else None
