"""The phases of a run: load, step, evaluation, save and export."""

import contextlib
from collections.abc import Callable, Iterator

from src.distributed.cpu import trimmed
from src.training.ema import averaged
from src.training.out_of_memory import explaining_memory
from src.training.run import Run

CONTEXTS: list[Callable[[str, Run | None], contextlib.AbstractContextManager[None]]] = [
    # contexts of each phase, given its name and, once there is one, the run: the last is the innermost
    explaining_memory,
    averaged,
    trimmed,
]


@contextlib.contextmanager
def in_phase(phase: str, run: Run | None = None) -> Iterator[None]:
    """Enter the contexts of a phase."""
    with contextlib.ExitStack() as contexts:
        for context in CONTEXTS:
            contexts.enter_context(context(phase, run))
        yield
