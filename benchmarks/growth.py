"""Growth: whether steps take longer, or more memory, after ten times as many steps, log lines or checkpoints, or with
ten times the data.

    python -m benchmarks.growth

The MLP of benchmarks/loop.py, of which a step takes 0.3 ms, shows what would be lost in a larger model's. Of two runs
with the same settings, one has ten times as much behind it; then they go on in turn. The longest ends after 200,000
steps. Memory is the peak of each, at its end.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks import pairs
from benchmarks.loop import MLP_EXAMPLES, SETTINGS
from benchmarks.pairs import Comparison, in_turn
from benchmarks.runs import NEVER, Side, arguments, ms_per_step, own, running

ROUNDS, TIMES, MOST = 10, 10, 1.02


@dataclass(frozen=True)
class Growth:
    """What two runs are compared by."""

    of: str
    turn: int
    """Steps."""
    before: tuple[int, int]
    """Steps that each run has behind it."""
    examples: tuple[int, int] = (MLP_EXAMPLES, MLP_EXAMPLES)
    log_every: int = 100
    save_every: int | None = None


GROWTHS = (
    Growth("steps", turn=2000, before=(180_000, 18_000)),
    Growth("data", turn=2000, before=(2000, 2000), examples=(TIMES * MLP_EXAMPLES, MLP_EXAMPLES)),
    Growth("log lines", turn=1000, before=(20_000, 2000), log_every=1),
    Growth("checkpoints", turn=200, before=(5000, 500), log_every=10, save_every=10),
)


def new_side(growth: Growth, number: int, folder: Path) -> Side:
    before, examples = growth.before[number], growth.examples[number]
    settings: dict[str, Any] = {"task.name": "mlp", "task.examples": examples, "log_every": growth.log_every}
    settings |= {"max_steps": before + (1 + ROUNDS) * growth.turn, "save_every": growth.save_every or NEVER}
    words = arguments(SETTINGS | settings | {"epochs": "null", "optim.schedule": "constant"})
    return Side(own("loop", "train", *words), folder / f"{growth.of}-{number}", every=growth.turn // growth.log_every)


def compare(growth: Growth, folder: Path) -> Iterator[Comparison]:
    sides = [new_side(growth, number, folder) for number in range(2)]
    with running(*sides):
        for side, before in zip(sides, growth.before, strict=True):
            side.start()
            side.turn(before // growth.log_every)
            side.seconds.clear()
        seconds = in_turn(ROUNDS, *(side.turn for side in sides))
        for side in sides:
            side.finish()
    times = [ms_per_step(growth.turn, taken) for taken in seconds]
    peaks = [[side.output.summary["peak_memory_bytes"][0] / 1e6] for side in sides]
    for question, unit, (more, less) in (("step", "ms/step", times), ("memory", "MB", peaks)):
        name = f"growth: {question}, {TIMES} times the {growth.of}"
        yield Comparison(name, unit, more, less, MOST, is_gain=False)


def measure(_: Path, folder: Path) -> list[Comparison]:
    return [row for growth in GROWTHS for row in compare(growth, folder)]


if __name__ == "__main__":
    pairs.main(measure, __doc__)
