"""All benchmarks that a CPU of two cores can run, in the table of docs/figures.md; benchmarks/gpu.py has the others.

    make bench [ARGS='--data_dir=DIR']       measures (MNIST is downloaded into DIR, `data`, where it is missing)
    make bench-check                         measures, and fails where a ratio is worse than in results.json
    make bench ARGS=--committed              measures nothing: the table of results.json, as docs/figures.md has it
    python -m benchmarks mnist loop          some of them
    python -m benchmarks --save              also writes each into results.json, for others to be compared with

Ratios are compared, never times, and each row is judged by its own noise: it is worse where all of its pairs are worse
than all of the committed ones, by more than 2%, and are so once more when measured again.
"""

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path

from benchmarks.pairs import Comparison, load, save, table
from benchmarks.runs import PROJECT

BENCHMARKS = (
    "startup", "loop", "mnist", "language", "chat", "evaluation", "two_processes", "streaming", "memory", "growth",
    "first_start",
)  # fmt: skip
RESULTS = Path(__file__).parent / "results.json"
MARGIN = 0.02


def measure(name: str, data_dir: str) -> list[Comparison]:
    """Measure in a process of its own: what one leaves behind must not slow down the next."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "rows.json"
        command = [sys.executable, "-m", f"benchmarks.{name}", f"--data_dir={data_dir}", f"--save={file}"]
        done = subprocess.run(command, cwd=PROJECT, stdout=subprocess.PIPE, text=True)
        if done.returncode:
            sys.exit(f"benchmarks.{name} ended with exit code {done.returncode}: {done.stdout}")
        print(f"{name}\n{done.stdout}", file=sys.stderr, flush=True)
        return load(file)


def worse(rows: list[Comparison], committed: dict[str, Comparison]) -> dict[str, str]:
    """Return those that are worse by more than the noise of both, each with a line about it."""
    found = {}
    for now in rows:
        then = committed.get(now.question, now)
        has_less = max(now.ratios) < min(then.ratios) * (1 - MARGIN)
        has_more = min(now.ratios) > max(then.ratios) * (1 + MARGIN)
        if has_less if now.is_gain else has_more:
            found[now.question] = f"{now.question}: {now.ratio:.3g}, was {then.ratio:.3g}"
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help=", ".join(BENCHMARKS))
    parser.add_argument("--data_dir", default="data")
    parser.add_argument("--save", action="store_true")
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--committed", action="store_true")
    chosen = parser.parse_args()
    committed = {row.question: row for row in load(RESULTS)}
    measured: list[Comparison] = []
    losses: list[str] = []
    for name in () if chosen.committed else chosen.names or BENCHMARKS:
        rows = measure(name, chosen.data_dir)
        if chosen.check and (suspected := worse(rows, committed)):
            print(f"worse: {', '.join(suspected)}: once more", file=sys.stderr, flush=True)
            rows = measure(name, chosen.data_dir)
            losses += [line for question, line in worse(rows, committed).items() if question in suspected]
        measured += rows
        if chosen.save:
            save((committed | {row.question: row for row in measured}).values(), RESULTS)
    print(table(committed.values() if chosen.committed else measured))
    if losses:
        sys.exit("worse than results.json, beyond the noise:\n" + "\n".join(losses))


if __name__ == "__main__":
    main()
