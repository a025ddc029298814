"""What a run is: what it came from, the state that a checkpoint keeps, and what a run resumes from."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from src.config.config import Config
from src.training.progress import Progress

FORMAT_VERSION = 4
"""Add one with every change to the files, to RunState or to Progress: a checkpoint of another version is refused."""


@dataclass(frozen=True, kw_only=True)
class Origin:
    """What a run is made from. Each checkpoint records it, and a resume compares it with its own."""

    settings: dict[str, Any]
    examples: int
    """Number of examples to train on."""
    schedule_steps: int
    """Optimizer steps that the learning-rate schedule spans."""
    fingerprints: list[str]
    """Those of the examples to train on and to evaluate on."""
    data_state: dict[str, Any]
    """What the task found out from its data."""
    frozen_norm: float
    """L2 norm over the parameters that are not trained."""
    strategy: str
    precision: str
    num_processes: int
    versions: dict[str, str]
    """Those of the libraries whose arithmetic another version may round differently."""


@dataclass(kw_only=True)
class RunState:
    """What state.json holds."""

    format_version: int = FORMAT_VERSION
    progress: Progress
    origin: Origin
    metrics_bytes: int = 0
    """Length of metrics.jsonl."""
    run_id: str | None = None
    """The id by which trackers continue the run."""


@dataclass(kw_only=True)
class ResumePoint:
    """What a run continues from."""

    checkpoint: Path | None = None
    """Folder of the checkpoint; None: the run starts at its beginning."""
    state: RunState | None = None
    notes: list[str] = field(default_factory=list)
    """Lines that tell the user about the choice."""
    is_finished: bool = False
    """Whether there is nothing left to do."""
    command: str = ""
    """The command that continues the run, if it is stopped."""

    @property
    def progress(self) -> Progress:
        """Return the counters that the run resumes with."""
        return self.state.progress if self.state else Progress()

    @property
    def summary(self) -> str:
        """Return what the run continues from, in one line; empty if there is no checkpoint."""
        if not (state := self.state):
            return ""
        where = f"from {self.checkpoint}, saved under {state.origin.strategy} x {state.origin.num_processes}"
        return f"after step {state.progress.step:,}, {where}"

    def is_own(self, config: Config) -> bool:
        """Return whether the checkpoint is of the run in this output folder, not of one that it branches off from."""
        own = config.folder / "checkpoints"  # which may be a link to another disk
        return self.checkpoint is not None and self.checkpoint.parent.resolve() == own.resolve()

    def own_state(self, config: Config) -> RunState | None:
        """Return the state of the run in this output folder; None if it begins, or branches off from another one."""
        return self.state if self.is_own(config) else None
