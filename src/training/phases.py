"""The phases of a run: load, step, evaluation, save and export."""

import contextlib
from collections.abc import Iterator

from src.training.out_of_memory import explaining_memory
from src.training.run import Run


@contextlib.contextmanager
def plain(_phase: str, _run: Run | None = None) -> Iterator[None]:
    """Leave errors as they are."""
    yield


in_phase, *_ = (
    # the first is the context of each phase, given its name and, once there is one, the run
    explaining_memory,
    plain,
)
