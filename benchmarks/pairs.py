"""What every benchmark here is made of: two things measured in turn (A B A B …), and one row of a table about them.

A benchmark is a function that returns rows: `main` gives it a folder with MNIST, one to work in, and its own options.
"""

import argparse
import json
import platform
import re
import signal
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, TypeVar

T = TypeVar("T")
TIMES = "\N{MULTIPLICATION SIGN}"
HEAD = "| question | ours | theirs | ratio | target | processor |\n|---|---|---|---|---|---|"


def processor() -> str:
    """Return the name of this machine's processor and its family, which tells virtual ones apart."""
    file, pattern = Path("/proc/cpuinfo"), r"^(model name|cpu family)\s*: (.*)$"
    found = dict(re.findall(pattern, file.read_text() if file.exists() else "", re.MULTILINE))
    return f"{found.get('model name', platform.machine())}, family {found.get('cpu family', 'unknown')}"


@dataclass(frozen=True)
class Comparison:
    """One question, answered in pairs."""

    question: str
    """What is compared, in a few words; names the row in results.json."""
    unit: str
    ours: list[float]
    """In `unit`, one value per round, as `theirs`: each was measured right before or after ours."""
    theirs: list[float]
    target: float
    """Bound for the median ratio."""
    is_gain: bool
    """True: the ratio says how many times as fast ours is, and more is better. False: how many times as much ours
    takes, and less is better."""
    processor: str = field(default_factory=processor)

    @property
    def ratios(self) -> list[float]:
        """One per round, in the direction that `is_gain` says."""
        is_speed = self.unit.endswith("/s")
        pairs = zip(self.ours, self.theirs, strict=True)
        return [(ours / theirs if is_speed == self.is_gain else theirs / ours) for ours, theirs in pairs]

    @property
    def ratio(self) -> float:
        """Their median."""
        return statistics.median(self.ratios)

    def __str__(self) -> str:
        """Return a row in Markdown with the medians; behind the ratio, its smallest and largest value."""
        ours, theirs = (f"{short(statistics.median(values))} {self.unit}" for values in (self.ours, self.theirs))
        speed = " the speed" * self.is_gain
        ratio = f"**{short(self.ratio)}{TIMES}**{speed} ({short(min(self.ratios))} to {short(max(self.ratios))})"
        is_reached = self.ratio >= self.target if self.is_gain else self.ratio <= self.target
        target = f"{'>=' if self.is_gain else '<='} {self.target:g}{', missed' * (not is_reached)}"
        return f"| {self.question} | {ours} | {theirs} | {ratio} | {target} | {self.processor} |"


def short(value: float) -> str:
    """Return a number in three digits; all digits of a larger one."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def table(comparisons: Iterable[Comparison]) -> str:
    return "\n".join([HEAD, *map(str, comparisons)])


def in_turn(rounds: int, *variants: Callable[[], T]) -> list[list[T]]:
    """Call each in each round, one after the other. Return what they returned, shape (variants, rounds)."""
    values = [[variant() for variant in variants] for _ in range(rounds)]
    return [list(of_variant) for of_variant in zip(*values, strict=True)]


def drift(values: Iterable[float], expected: Iterable[float]) -> float:
    """Return the largest relative difference."""
    return max(abs(a / b - 1) for a, b in zip(values, expected, strict=True))


def save(comparisons: Iterable[Comparison], file: Path) -> None:
    """Write a line for each, its values to six digits."""
    rows = [asdict(c) for c in comparisons]
    for row in rows:
        row |= {name: [float(f"{value:.6g}") for value in row[name]] for name in ("ours", "theirs")}
    file.write_text("[\n" + ",\n".join(map(json.dumps, rows)) + "\n]\n")


def load(file: Path) -> list[Comparison]:
    return [Comparison(**row) for row in json.loads(file.read_text())]


def main(
    measure: Callable[..., list[Comparison]],
    doc: str | None,
    sides: Mapping[str, Callable[[list[str]], object]] | None = None,
    **options: Mapping[str, Any],
) -> None:
    """Call `measure` and print its rows, or one of the benchmark's `sides` with the words behind its name.

    Args:
        options: what `add_argument` takes, by the name of one of `measure`'s arguments.
    """
    if sides and sys.argv[1:] and (side := sides.get(sys.argv[1])):
        del sys.argv[1]
        side(sys.argv[1:])
        return
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data_dir", type=Path, default="data", help="folder with MNIST; downloaded where missing")
    parser.add_argument("--save", type=Path, help="a file for the rows, as JSON")
    for name, how in options.items():
        parser.add_argument(f"--{name}", **how)
    chosen = vars(parser.parse_args())
    data_dir, file = chosen.pop("data_dir").absolute(), chosen.pop("save")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # else it would leave stopped processes behind
    with tempfile.TemporaryDirectory() as folder:
        rows = measure(data_dir, Path(folder), **chosen)
    print(table(rows))
    if file:
        save(rows, file)
