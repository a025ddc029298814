"""What a run is: the state that a checkpoint keeps, and what a run continues from."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from src.config.config import Config
from src.training.progress import Progress

FORMAT_VERSION = 3
"""Add one with every change to the files, to RunState or to Progress: a checkpoint of another version is refused."""


@dataclass(kw_only=True)
class RunState:
    """What state.json holds."""

    format_version: int = FORMAT_VERSION
    progress: Progress
    config: dict[str, Any]
    data_state: dict[str, Any]  # room: text examples
    examples: int  # room: safeguards
    """Number of examples to train on."""
    data: list[str]  # room: machines safeguards trackers wandb
    """Fingerprints of the examples to train on and to evaluate on."""
    frozen_norm: float  # room: text examples
    """L2 norm over the parameters that are not trained."""
    strategy: str
    precision: str
    num_processes: int
    versions: dict[str, str]  # room: safeguards
    metrics_bytes: int = 0
    """Length of metrics.jsonl."""
    wandb_id: str | None = None  # room: trackers wandb


@dataclass
class ResumePoint:
    """What a run continues from."""

    checkpoint: Path | None = None
    """Folder of the checkpoint; None: the run starts at its beginning."""
    state: RunState | None = None
    notes: list[str] = field(default_factory=list)
    """Lines that tell the user about the choice."""
    is_finished: bool = False
    """Whether there is nothing left to do."""
    mirror: Any = None  # room: mirror
    """The Mirror of src/checkpoint/mirror.py, which keeps copies of the run's checkpoints; None: there is none."""

    @property
    def progress(self) -> Progress:
        """Return the counters that the run goes on with."""
        return self.state.progress if self.state else Progress()

    @property
    def summary(self) -> str:
        """Return what the run continues from, in one line; empty if there is no checkpoint."""
        if not (state := self.state):
            return ""
        where = f"from {self.checkpoint}, saved under {state.strategy} x {state.num_processes}"
        return f"after step {state.progress.step:,}, {where}"

    @property
    def is_disk_shared(self) -> bool:  # room: mirror
        """Return whether all machines see the same output folder, as they must without a mirror."""
        return self.mirror is None or self.mirror.is_shared

    def is_own(self, config: Config) -> bool:
        """Return whether the checkpoint is of the run in this output folder, not of one that it branches off from."""
        own = config.folder / "checkpoints"  # which may be a link to another disk
        return self.checkpoint is not None and self.checkpoint.parent.resolve() == own.resolve()
