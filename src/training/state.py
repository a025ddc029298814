"""The state of a run: its origin, what a checkpoint saves, and what a run resumes from."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from src.config.config import Config
from src.training.progress import Count, Progress

FORMAT_VERSION = 5
"""Increment with every change to the files, RunState or Progress. Checkpoints of other versions are refused."""


@dataclass(frozen=True, kw_only=True)
class RunInputs:
    """The inputs of a run. Each checkpoint saves them, and a resuming run compares them with its own."""

    settings: dict[str, Any]
    examples: Count
    """Number of training examples."""
    schedule_steps: Count
    """Optimizer steps that the learning-rate schedule spans."""
    fingerprints: list[str]
    """Fingerprints of the training set and the evaluation set."""
    data_state: dict[str, Any]
    """What the task derived from its data."""
    frozen_norm: float
    """L2 norm of the frozen parameters."""
    strategy: str
    precision: str
    num_processes: Count
    versions: dict[str, str]
    """Versions of the libraries whose results may be rounded differently by another version."""


@dataclass(kw_only=True)
class RunState:
    """The contents of state.json."""

    format_version: int = FORMAT_VERSION
    progress: Progress
    origin: RunInputs
    metrics_bytes: Count
    """Length of metrics.jsonl."""
    run_id: str | None
    """The id under which trackers resume the run."""
    folder: str
    """Absolute path of the output folder."""


@dataclass(kw_only=True)
class ResumePoint:
    """Holds where a run resumes."""

    checkpoint: Path | None = None
    """Folder of the checkpoint; None: the run starts from scratch."""
    state: RunState | None = None
    notes: list[str] = field(default_factory=list)
    """Lines that explain the choice to the user."""
    is_finished: bool = False
    """Whether there is nothing left to do."""
    command: str = ""
    """The command that resumes the run once it is stopped."""

    @property
    def progress(self) -> Progress:
        """Return the counters that the run resumes with."""
        return self.state.progress if self.state else Progress()

    @property
    def summary(self) -> str:
        """Return where the run resumes, in one line; empty if there is no checkpoint."""
        if not (state := self.state):
            return ""
        where = f"from {self.checkpoint}, saved under {state.origin.strategy} x {state.origin.num_processes}"
        return f"after step {state.progress.step:,}, {where}"

    def own_state(self, config: Config) -> RunState | None:
        """Return the saved state of this output folder's run; None if the run is new or branches off another one."""
        own = config.folder / "checkpoints"  # may be a link to another disk
        is_own = self.checkpoint and self.checkpoint.parent.resolve() == own.resolve()
        return self.state if is_own else None
