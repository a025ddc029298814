"""Where the checkpoints of a run are, which is the newest valid one, and which ones to keep."""

import contextlib
from datetime import timedelta
from pathlib import Path

from accelerate import Accelerator
from accelerate.utils import broadcast_object_list, gather_object

from src.checkpoint.files import INCOMPLETE, Json, discard, file_facts, list_checkpoints, step_of
from src.checkpoint.integrity import Damaged, problems
from src.config.config import Config
from src.training.progress import Evaluations
from src.training.score import score


class Store:
    """The checkpoints in a run's output folder, which all machines share."""

    def __init__(self, accelerator: Accelerator, config: Config) -> None:
        self.accelerator, self.config = accelerator, config
        self.folder = config.folder / "checkpoints"
        self.is_first = accelerator.is_main_process
        """Whether this process makes the folders of checkpoints."""
        self.timeout = timedelta(minutes=config.timeout_minutes)
        """How long a process waits until the others have written their files."""
        self.shard = accelerator.process_index, accelerator.num_processes
        """(r, n): this process verifies every n-th file of a checkpoint, starting at the r-th."""

    def checkpoints(self) -> list[Path]:
        """Return the checkpoints, newest first."""
        return list_checkpoints(self.folder)

    def first_valid(self, candidates: list[Path]) -> tuple[Path | None, Damaged]:
        """Return the first valid one of the main process's candidates, and what is wrong with those before it.
        Collective."""
        # as the main process sees them: a change to a file system reaches machines at different times
        (candidates,) = broadcast_object_list([candidates])
        damaged: Damaged = {}
        for checkpoint in candidates:
            wrong = self.problems(checkpoint)
            if not wrong:
                return checkpoint, damaged
            damaged[checkpoint] = wrong[0]
        return None, damaged

    def problems(self, checkpoint: Path) -> list[str]:
        """Return what is wrong with a checkpoint, of which each process reads a part. Collective."""
        return gather_object([*problems(checkpoint, shard=self.shard)])

    def record(self, folder: Path, *names: str) -> Json:
        """Return the manifest's entries of files that this process has written into an incomplete checkpoint."""
        return {name: file_facts(folder / name) for name in names}

    def rotate(self, evaluations: Evaluations) -> None:
        """Delete the checkpoints in the output folder that the settings don't keep. A crash in between leaves nothing
        that looks like a checkpoint. Called on the main process."""
        published = list_checkpoints(self.folder)
        for path in set(published).difference(self.kept(published, evaluations)):
            discard(path.rename(path.with_name(f"{INCOMPLETE}deleted_{path.name}")))

    def kept(self, checkpoints: list[Path], evaluations: Evaluations) -> list[Path]:
        """Return those of the checkpoints, newest first, that the settings keep."""
        settings = self.config.checkpoint
        return checkpoints[: settings.keep_last] + self.best_first(checkpoints, evaluations)[: settings.num_best]

    def best_first(self, checkpoints: list[Path], evaluations: Evaluations) -> list[Path]:
        """Return the checkpoints whose step was evaluated, sorted by checkpoint.metric, best first; ties keep their
        order."""
        metric, mode = self.config.checkpoint.metric, self.config.checkpoint.mode
        scores = {
            path: score(results[metric], metric, mode)
            for path in checkpoints
            if metric in (results := evaluations.get(step_of(path), {}))
        }
        return sorted(scores, key=scores.__getitem__, reverse=True)


def local_store(accelerator: Accelerator, config: Config) -> contextlib.AbstractContextManager[Store]:
    """Open the store of a run without a mirror."""
    return contextlib.nullcontext(Store(accelerator, config))
