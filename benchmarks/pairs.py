"""What every benchmark here is made of: two things measured in turn (A B A B …), and one row of a table about them."""

import argparse
import json
import signal
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TypeVar

T = TypeVar("T")


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
    is_speed: bool = False
    """Whether more of the unit is better, as of tokens per second."""

    @property
    def ratios(self) -> list[float]:
        """One per round, in the direction that `is_gain` says."""
        pairs = zip(self.ours, self.theirs, strict=True)
        return [(ours / theirs if self.is_speed == self.is_gain else theirs / ours) for ours, theirs in pairs]

    @property
    def ratio(self) -> float:
        """Their median."""
        return statistics.median(self.ratios)

    @property
    def is_reached(self) -> bool:
        """Whether the target is."""
        return self.ratio >= self.target if self.is_gain else self.ratio <= self.target


def in_turn(rounds: int, *variants: Callable[[], T]) -> list[list[T]]:
    """Call each in each round, one after the other. Return what they returned, shape (variants, rounds)."""
    values = [[variant() for variant in variants] for _ in range(rounds)]
    return [list(of_variant) for of_variant in zip(*values, strict=True)]


def drift(values: Iterable[float], expected: Iterable[float]) -> float:
    """Return the largest relative difference."""
    return max(abs(a / b - 1) for a, b in zip(values, expected, strict=True))


def table(comparisons: Iterable[Comparison]) -> str:
    """Return a row for each, with the medians; behind the ratio its smallest and largest value."""
    head = ("question", "ours", "theirs", "ratio", "spread", "target")
    rows = [head]
    for c in comparisons:
        ours, theirs = (f"{statistics.median(values):.4g} {c.unit}" for values in (c.ours, c.theirs))
        spread = f"{min(c.ratios):.3g} to {max(c.ratios):.3g}"
        target = f"{'>=' if c.is_gain else '<='} {c.target:g}" + ("" if c.is_reached else "  missed")
        rows.append((c.question, ours, theirs, f"{c.ratio:.3g}", spread, target))
    widths = [max(len(row[i]) for row in rows) for i in range(len(head))]
    return "\n".join("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in rows)


def save(comparisons: Iterable[Comparison], file: Path) -> None:
    file.write_text(json.dumps([asdict(c) for c in comparisons], indent=1) + "\n")


def load(file: Path) -> list[Comparison]:
    return [Comparison(**row) for row in json.loads(file.read_text())]


def parser(doc: str | None) -> argparse.ArgumentParser:
    """Return the command line of a benchmark, to which it can add options of its own."""
    options = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--data_dir", type=Path, default="data", help="folder with MNIST; downloaded where missing")
    options.add_argument("--save", type=Path, help="a file for the rows, as JSON")
    return options


def main(measure: Callable[..., list[Comparison]], options: argparse.ArgumentParser) -> None:
    """Call `measure` with the folder with MNIST, one to work in, and the benchmark's own options."""
    chosen = vars(options.parse_args())
    data_dir, file = chosen.pop("data_dir").absolute(), chosen.pop("save")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # else it would leave stopped processes behind
    with tempfile.TemporaryDirectory() as folder:
        rows = measure(data_dir, Path(folder), **chosen)
    print(table(rows))
    if file:
        save(rows, file)
