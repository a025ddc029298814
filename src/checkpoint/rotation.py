"""Which checkpoints are kept, and the deletion of the others."""

import shutil
from pathlib import Path

from src.checkpoint.format import INCOMPLETE, step_of
from src.config.groups import Checkpoint
from src.training.progress import Evaluations
from src.training.score import score


def superfluous(whole: list[Path], settings: Checkpoint, evaluations: Evaluations) -> list[Path]:
    """Return which of the whole checkpoints, the newest first, the settings don't keep."""
    best = best_first(whole, settings, evaluations)[: settings.num_best]
    kept = whole[: settings.keep_last] + best
    return [path for path in whole if path not in kept]


def best_first(checkpoints: list[Path], settings: Checkpoint, evaluations: Evaluations) -> list[Path]:
    """Return those whose step was evaluated, sorted by checkpoint.metric, the best first; ties stay in their order."""
    scores = {}
    for path in checkpoints:
        value = evaluations.get(step_of(path), {}).get(settings.metric)
        if value is not None:
            scores[path] = score(value, settings.metric, settings.mode)
    return sorted(scores, key=scores.__getitem__, reverse=True)


def delete(checkpoint: Path) -> None:
    """Delete a checkpoint, so that a crash in between leaves nothing that looks like one."""
    if checkpoint.is_symlink():  # someone moved the folder to another disk: it is theirs
        checkpoint.unlink()
    else:
        shutil.rmtree(checkpoint.rename(checkpoint.with_name(f"{INCOMPLETE}deleted_{checkpoint.name}")))
