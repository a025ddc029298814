"""All benchmarks that a CPU of two cores can run, in under 25 minutes, in one table; benchmarks/gpu.py has the others.

    make bench [ARGS='--data_dir=DIR']       measures (MNIST is downloaded into DIR, `data`, where it is missing)
    make bench-check                         measures, and fails where a ratio is worse than in results.json
    python -m benchmarks mnist loop          some of them
    python -m benchmarks --save              also writes results.json, for others to be compared with

Ratios are compared, never times, and each row is judged by its own noise: it is worse where all of its pairs are worse
than all of the committed ones, by more than 2%, and are so once more when measured again.
"""

import argparse
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from benchmarks.pairs import Comparison, load, save, table

QUESTIONS = (
    "loop", "mnist", "evaluation", "data_parallel", "transformer", "packing", "sharding", "startup", "everything_on",
    "growth",
)  # fmt: skip
RESULTS = Path(__file__).parent / "results.json"
MARGIN = 0.02


def measured(question: str, data_dir: str) -> list[Comparison]:
    """In a process of its own: what one leaves behind must not slow down the next."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "rows.json"
        command = [sys.executable, "-m", f"benchmarks.{question}", f"--data_dir={data_dir}", f"--save={file}"]
        started = time.perf_counter()
        done = subprocess.run(command, cwd=Path(__file__).parent.parent, stdout=subprocess.PIPE, text=True)
        if done.returncode:
            sys.exit(f"benchmarks.{question} ended with exit code {done.returncode}: {done.stdout}")
        print(f"{question}: {time.perf_counter() - started:.0f} s\n{done.stdout}", flush=True)
        return load(file)


def is_worse(now: Comparison, then: Comparison) -> bool:
    """Whether by more than the noise of both."""
    if now.is_gain:
        return max(now.ratios) < min(then.ratios) * (1 - MARGIN)
    return min(now.ratios) > max(then.ratios) * (1 + MARGIN)


def check(question: str, data_dir: str, committed: dict[str, Comparison]) -> tuple[list[Comparison], list[str]]:
    """Returns: the rows, and what is worse in them, a line each."""
    rows, lost = measured(question, data_dir), set[str]()
    for attempt in (1, 2):
        found = {row.question for row in rows if row.question in committed and is_worse(row, committed[row.question])}
        lost = found if attempt == 1 else lost & found
        if not lost or attempt == 2:
            break
        print(f"worse: {', '.join(sorted(lost))}: once more", flush=True)
        rows = measured(question, data_dir)
    return rows, [
        f"{row.question}: {row.ratio:.3g}, was {committed[row.question].ratio:.3g}"
        for row in rows
        if row.question in lost
    ]


def main() -> None:
    parser = argparse.ArgumentParser(
        "python -m benchmarks", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("questions", nargs="*", help=", ".join(QUESTIONS))
    parser.add_argument("--data_dir", default="data")
    parser.add_argument("--save", action="store_true")
    parser.add_argument("--check", action="store_true")
    arguments = parser.parse_args()
    if unknown := set(arguments.questions) - set(QUESTIONS):
        parser.error(f"{', '.join(sorted(unknown))}: no such benchmark ({', '.join(QUESTIONS)})")
    committed = {row.question: row for row in load(RESULTS)} if RESULTS.is_file() else {}
    rows: list[Comparison] = []
    losses: list[str] = []
    for question in arguments.questions or QUESTIONS:
        found, lost = check(question, arguments.data_dir, committed if arguments.check else {})
        rows += found
        losses += lost
    print(table(rows))
    if arguments.save:
        save((committed | {row.question: row for row in rows}).values(), RESULTS)
    if losses:
        sys.exit("worse than results.json, beyond the noise:\n" + "\n".join(losses))


if __name__ == "__main__":
    main()
