"""Where the checkpoints of a run are: in its output folder, which all machines share."""

from collections.abc import Callable, Iterable
from datetime import timedelta
from pathlib import Path

from src.checkpoint.folder import list_checkpoints
from src.checkpoint.format import Json, publish
from src.config.config import Config


class Store:
    """The checkpoints of one run. A store that keeps copies of them elsewhere does more in these methods."""

    is_shared = True
    """Whether all machines see the same output folder."""
    copying: Path | None = None
    """The published checkpoint that is being copied elsewhere."""

    def __init__(self, config: Config) -> None:
        self._config, self._own = config, config.folder / "checkpoints"

    def bring_record(self) -> list[Path]:
        """Fetch the run's record from elsewhere if it is newer there. Return the checkpoints that are there, the newest
        first. Called on the main process."""
        return []

    def candidates(self) -> list[Path]:
        """Return the checkpoints to resume from, the newest first; for the main process."""
        return list_checkpoints(self._own)

    def fetch(self, checkpoint: Path, wrong: list[str]) -> tuple[Path, list[str]]:
        """Fetch a checkpoint from elsewhere if that helps. Return its path on this machine, and what is still `wrong`
        with it. Collective."""
        return checkpoint, wrong

    def catch_up(self, checkpoint: Path, is_finished: bool) -> None:
        """Copy a checkpoint whose copy failed or was interrupted. Called on the main process."""

    def timeout(self, minutes: float) -> timedelta:
        """Return how long a process may wait for the others to write their parts of a checkpoint."""
        return timedelta(minutes=minutes)

    def put(self, folder: Path, files: Iterable[str]) -> None:
        """Take files that this process has written into the folder of an unfinished checkpoint."""

    def publish(self, folder: Path, files: Json, checkpoint: Path) -> bool:
        """Publish a checkpoint that all processes have written. Return whether it is in the output folder now. Called
        on the main process. Raise an OSError if a file is not there as it was written.

        Args:
            folder: that of the unfinished checkpoint.
            files: the facts about each file, by name.
        """
        for name, facts in files.items():
            file = folder / name
            if not file.exists() or file.stat().st_size != facts["bytes"]:
                raise OSError(f"{file} is not as its process wrote it: share output_dir, or set checkpoint.mirror")
        publish(folder, files, checkpoint)
        return True

    def await_all(self, is_busy: Callable[[], bool]) -> None:
        """Wait for all processes that may be `is_busy` for longer than a collective waits. Collective."""

    def close(self) -> None:
        """Wait for what is being copied."""
