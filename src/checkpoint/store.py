"""Where the checkpoints of a run are, which is the newest valid one, and which ones to keep."""

import math
from pathlib import Path
from typing import Any

from accelerate import Accelerator
from accelerate.utils import broadcast_object_list, gather_object

from src.checkpoint.files import INCOMPLETE, Json, discard, list_checkpoints, publish, step_of
from src.checkpoint.integrity import Damaged, problems
from src.config.config import Config
from src.config.groups import Checkpoint
from src.training.progress import Evaluations
from src.training.score import score


class Store:
    """The checkpoints in a run's output folder, and their copies in its mirror, if it has one."""

    def __init__(self, config: Config, mirror: Any = None) -> None:
        self._config, self._own = config, config.folder / "checkpoints"
        self.mirror = mirror
        """A Mirror of src/checkpoint/mirror.py."""
        self.is_shared = mirror is None or mirror.is_disk_shared
        """Whether all machines see the same output folder. If not, only the mirror has whole checkpoints."""

    def candidates(self) -> list[Path]:
        """Return the checkpoints to resume from, newest first, by their path in the output folder."""
        mirrored = self.mirror.checkpoints() if self.mirror else []
        return sorted({*list_checkpoints(self._own), *mirrored}, key=step_of, reverse=True)

    def publish_checkpoint(self, folder: Path, files: Json, checkpoint: Path) -> None:
        """Publish a checkpoint that all processes have written, on a shared disk. Called on the main process. Raise an
        OSError if a file is missing, or incomplete.

        Args:
            folder: folder of the incomplete checkpoint.
            files: manifest entry of each file, by name.
        """
        for name, facts in files.items():
            file = folder / name
            if not file.exists() or file.stat().st_size != facts["bytes"]:
                raise OSError(f"{file} differs from what was written: share output_dir, or set checkpoint.mirror")
        publish(folder, files, checkpoint)
        if self.mirror:
            self.mirror.copy_in_background(checkpoint)

    def rotate(self, evaluations: Evaluations) -> None:
        """Delete the checkpoints in the output folder that the settings don't keep. A crash in between leaves nothing
        that looks like a checkpoint."""
        whole = [path for path in list_checkpoints(self._own) if not any(problems(path, contents=False))]
        kept = [*chosen(whole, self._config.checkpoint, evaluations), self.mirror and self.mirror.copying]
        for path in whole:
            if path not in kept:
                discard(path.rename(path.with_name(f"{INCOMPLETE}deleted_{path.name}")))


def first_valid(accelerator: Accelerator, candidates: list[Path], store: Store) -> tuple[Path | None, Damaged]:
    """Return the first valid one of the main process's candidates, and what is wrong with those before it. The
    processes that share a disk read a part of the files each. Collective."""
    # as the main process sees them: a change to a file system reaches machines at different times
    (candidates,) = broadcast_object_list([candidates])
    damaged: Damaged = {}
    shard = (accelerator.process_index, accelerator.num_processes) if store.is_shared else (0, 1)
    for checkpoint in candidates:
        wrong = gather_object(list(problems(checkpoint, shard=shard)))
        if wrong and store.mirror:
            store.mirror.fetch(checkpoint, accelerator)
            wrong = gather_object(list(problems(checkpoint, shard=shard)))
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
