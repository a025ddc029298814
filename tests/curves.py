"""Short runs whose curves are compared, and the tables of them in core/test_parity.py and faults/test_resume.py."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from filelock import FileLock


def no_data(_: Path) -> None:
    """Write the data of a task that needs none."""


@dataclass(frozen=True)
class Short:
    """A run of some steps."""

    arguments: tuple[str, ...]
    """In which {folder} stands for that of its data."""
    data: Callable[[Path], None] = no_data
    """Writes what the arguments name into a new folder. All tasks with the same function share it."""
    alone: tuple[str, ...] = ()
    """Further arguments on one process, for the curve that the others must have."""
    split: tuple[str, ...] = ()
    """Further arguments under a strategy."""
    before: str = ""
    """As that of `launch`, under a strategy."""
    launcher_arguments: tuple[str, ...] = ()
    within: float | None = 1e-5
    """The relative difference allowed between two curves; None: that of the fixture `rounding`."""
    saved: int = 0
    """A step with a checkpoint before the last one."""

    def ready(self, shared: Path) -> "Short":
        """Return it with its data, in a folder that all of pytest's processes share. Leave them as they are."""
        folder = shared / self.data.__name__
        written = Path(f"{folder}.written")
        with FileLock(f"{folder}.lock"):
            if not written.exists():
                folder.mkdir(exist_ok=True)
                self.data(folder)
                written.touch()
        return replace(self, arguments=tuple(word.replace("{folder}", str(folder)) for word in self.arguments))

    def run(self, by: Callable[..., Any], yaml: str | Path, *arguments: str, before: str = "", **more: Any) -> Any:
        """Call `launch`, `whole` or `rounding` with it under this strategy, or ("alone") on one process."""
        is_split = yaml != "alone"
        how = (*self.arguments, *(self.split if is_split else self.alone), *arguments)
        more = {"launcher_arguments": self.launcher_arguments, "before": self.before * is_split + before} | more
        return by(yaml if is_split else "cpu", *how, **{name: value for name, value in more.items() if value})


def cells(*lines: str) -> list[Any]:
    """Return the parameters (task, yaml, processes) of each cell but "-" in a table; "slow" ones are marked so. Its
    columns are strategies, "fsdp" or "fsdp-4"; its rows begin with a task's name."""
    header, *rows = "\n".join(lines).strip("\n").splitlines()
    columns, found = header.split(), []
    for row in rows:
        words = row.split()
        name = " ".join(words[: -len(columns)])
        for column, cell in zip(columns, words[-len(columns) :], strict=True):
            yaml, _, processes = column.partition("-")
            marks = [pytest.mark.slow] if cell == "slow" else []
            if cell != "-":
                found.append(pytest.param(name, yaml, int(processes or 0), marks=marks, id=f"{name}-{column}"))
    return found
