"""The settings that every task has. A task may have its own in a file without torch: see src/tasks/__init__.py."""

from collections.abc import Mapping
from typing import Any, ClassVar

from src.config.settings import Settings, Values


class TaskSettings(Settings):
    """Settings that every task has."""

    name: str
    """The task to train."""
    metric_names: ClassVar[tuple[str, ...] | None] = None
    """Names that `Task.metrics` returns, to check settings that name a metric at the start; None: not known yet."""

    @classmethod
    def run_defaults(cls, given: Mapping[str, Any]) -> Values:
        """Return this task's own defaults of epochs, global_batch_size and optim.*, by dotted name, where they differ
        from those of other tasks. `given` has the settings that the user has given."""
        return {}
