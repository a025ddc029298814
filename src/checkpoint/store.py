"""Where the checkpoints of a run are, which is the newest valid one, and which ones to keep."""

import math
import shutil
from collections.abc import Iterable
from pathlib import Path

from accelerate import Accelerator
from accelerate.utils import broadcast_object_list, gather_object

from src.checkpoint.files import INCOMPLETE, Json, list_checkpoints, publish, step_of
from src.checkpoint.integrity import Damaged, problems
from src.config.config import Config
from src.config.groups import Checkpoint
from src.training.progress import Evaluations
from src.training.score import score


class Store:
    """The checkpoints in a run's output folder, which all machines share. A subclass may keep copies elsewhere."""

    is_shared = True
    """Whether all machines see the same output folder."""
    copying: Path | None = None
    """The published checkpoint that is being copied elsewhere."""

    def __init__(self, config: Config) -> None:
        self._config, self._own = config, config.folder / "checkpoints"

    def fetch_run_files(self) -> list[Path]:
        """Fetch metrics.jsonl and config.yaml from elsewhere if they are newer there. Return the checkpoints there,
        newest first. Called on the main process."""
        return []

    def candidates(self) -> list[Path]:
        """Return the checkpoints to resume from, newest first. Only the main process's answer counts."""
        return list_checkpoints(self._own)

    def fetch_checkpoint(self, checkpoint: Path, wrong: list[str]) -> tuple[Path, list[str]]:
        """Fetch a checkpoint from elsewhere if that repairs it. Return its path on this machine, and what is still
        wrong with it. Collective."""
        return checkpoint, wrong

    def catch_up(self, checkpoint: Path, is_finished: bool) -> None:
        """Copy a checkpoint whose copy failed or was interrupted. Called on the main process."""

    def put(self, folder: Path, files: Iterable[str]) -> None:
        """Copy files that this process has written into the folder of an incomplete checkpoint."""

    def publish_checkpoint(self, folder: Path, files: Json, checkpoint: Path) -> bool:
        """Publish a checkpoint that all processes have written. Return whether it is now in the output folder. Called
        on the main process. Raise an OSError if a file is missing, or incomplete.

        Args:
            folder: folder of the incomplete checkpoint.
            files: manifest entry of each file, by name.
        """
        for name, facts in files.items():
            file = folder / name
            if not file.exists() or file.stat().st_size != facts["bytes"]:
                raise OSError(f"{file} differs from what was written: share output_dir, or set checkpoint.mirror")
        publish(folder, files, checkpoint)
        return True

    def rotate(self, evaluations: Evaluations) -> None:
        """Delete the checkpoints in the output folder that the settings don't keep. A crash in between leaves nothing
        that looks like a checkpoint."""
        whole = [path for path in list_checkpoints(self._own) if not any(problems(path, contents=False))]
        kept = [*chosen(whole, self._config.checkpoint, evaluations), self.copying]
        for path in whole:
            if path in kept:
                continue
            if path.is_symlink():  # the user moved the folder to another disk
                path.unlink()
            else:
                shutil.rmtree(path.rename(path.with_name(f"{INCOMPLETE}deleted_{path.name}")))

    def close(self) -> None:
        """Wait for the copy in progress."""


def first_valid(accelerator: Accelerator, candidates: list[Path], store: Store) -> tuple[Path | None, Damaged]:
    """Return the first valid one of the main process's candidates, and what is wrong with those before it. Each process
    reads a part of the files. Collective."""
    # as the main process sees them: a change to a file system reaches machines at different times
    (candidates,) = broadcast_object_list([candidates])
    damaged: Damaged = {}
    shard = accelerator.process_index, accelerator.num_processes
    for checkpoint in candidates:
        wrong = gather_object(list(problems(checkpoint, shard=shard)))
        checkpoint, wrong = store.fetch_checkpoint(checkpoint, wrong)
        if not wrong:
            return checkpoint, damaged
        damaged[checkpoint] = wrong[0]
    return None, damaged


def chosen(whole: list[Path], settings: Checkpoint, evaluations: Evaluations) -> list[Path]:
    """Return those of the whole checkpoints, newest first, that the settings keep."""
    return whole[: settings.keep_last] + best_first(whole, settings, evaluations)[: settings.num_best]


def best_first(checkpoints: list[Path], settings: Checkpoint, evaluations: Evaluations) -> list[Path]:
    """Return the checkpoints whose step was evaluated, sorted by checkpoint.metric, best first; ties keep their
    order."""
    scores = {path: score_at(step_of(path), settings, evaluations) for path in checkpoints}
    return sorted((path for path in scores if scores[path] > -math.inf), key=scores.__getitem__, reverse=True)


def score_at(step: int, settings: Checkpoint, evaluations: Evaluations) -> float:
    """Return the score of a step's evaluation by checkpoint.metric, higher is better; minus infinity: there is none."""
    results = evaluations.get(step, {})
    return score(results[settings.metric], settings.metric, settings.mode) if settings.metric in results else -math.inf
