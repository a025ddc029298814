"""The settings that every task has. A task may have its own in a file without torch: see src/tasks/__init__.py."""

from typing import ClassVar

from src.config.settings import Settings


class TaskSettings(Settings):
    """Settings that every task has."""

    name: str
    """The task to train."""
    metric_names: ClassVar[tuple[str, ...] | None] = None
    """Names that `Task.metrics` returns, to check settings that name a metric at the start; None: not known yet."""
