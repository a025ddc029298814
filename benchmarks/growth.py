"""Growth: what becomes of a step's time and of memory as a run gets long and large. None of it should grow.

    python -m benchmarks.growth [--only steps data record kept processes long]

CPU seconds per step and process, so that waiting for a core doesn't count, and a process's resident memory, at one and
at ten times the size; both are measured in turn, each in a process of its own, on one thread. It is the loop that is
asked: a step of the MLP takes a third of a millisecond.

- steps: steps 4,000 and on, against steps 40,000 and on.
- data: 12,800 and 128,000 examples. Memory is that without the examples themselves.
- record: an evaluation every 40 steps, a line in metrics.jsonl every 20, a save every 1,000; at 6 thousand steps (300
  lines, 150 evaluations, which each checkpoint keeps), against 60 thousand.
- kept: 2 and 20 checkpoints are kept, one is saved every 200 steps.
- processes: 1 and 4 (ddp.yaml, gloo), of the MNIST CNN with 64 images each. A single process exchanges no gradients,
  so the same is asked of plain DDP (two_processes.py), and its growth compared with ours.
- long: 200,000 steps of one run, with an evaluation every 5,000 and a save every 10,000: its last tenth against the
  second tenth of a run like it, in turn, so that the machine's own drift doesn't count. It prints each tenth too.
"""

import statistics
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal

import psutil
import torch

from benchmarks import pairs
from benchmarks.loop import BATCH, SETTINGS, Mlp
from benchmarks.pairs import Comparison, in_turn
from benchmarks.runs import CNN, NEVER, Side, arguments, running, train_py, write_images
from benchmarks.two_processes import INTERVAL, plain_ddp
from src.tasks import TASKS
from src.tasks.base import Tables, Tensors
from src.tasks.mnist import Digits
from train import main

ROUNDS, TURN = 5, 4_000
EXAMPLES, BYTES_PER_EXAMPLE = 200 * BATCH, 4 * 32 + 8
LONG = 200_000
TARGET, DRIFT = 1.05, 1.02
LAUNCHERS = {"accelerate.commands.launch", "torch.distributed.run"}


class Vectors(Mlp):
    """The MLP with as many examples as asked for."""

    name: Literal["vectors"] = "vectors"  # type: ignore[assignment]
    """The task to train."""
    examples: int = EXAMPLES
    """Number of training examples."""

    def build_datasets(self) -> tuple[Digits, Digits]:
        torch.manual_seed(1)
        vectors = torch.randn(self.examples, 32)
        train = Digits(vectors, (vectors @ torch.randn(32, 10)).argmax(1))
        return train, Digits(*train.__getitems__(list(range(BATCH))).values())

    def tables(self, outputs: Tensors, dataset: Any) -> Tables:
        return {}  # of images


class Watched(Side):
    """A side of which CPU seconds and memory are known. `steps` is the length of a turn."""

    def __init__(self, side: Side, steps: int, processes: int = 1) -> None:
        super().__init__(side.command, side.folder, ends=side.ends, every=side.every, file=side.file)
        self.steps, self.processes = steps, processes

    @property
    def trainers(self) -> list[psutil.Process]:
        """The processes that train, without their launcher."""
        assert self.process
        family = [self.process, *self.process.children(recursive=True)]
        trainers = []
        for member in family:
            with suppress(psutil.Error):  # it has just ended
                words = member.cmdline()
                if "--output_dir=run" in words and not LAUNCHERS & {*words}:
                    trainers.append(member)
        assert len(trainers) == self.processes, trainers
        return trainers

    def cpu_per_step(self) -> float:
        times = [trainer.cpu_times() for trainer in self.trainers]
        return sum(time.user + time.system for time in times)

    def megabytes(self) -> float:
        """Return the resident memory of its largest process."""
        return max(trainer.memory_info().rss for trainer in self.trainers) / 1e6

    def measured_turn(self) -> tuple[float, float]:
        """Take a turn. Return CPU milliseconds per step and process, and the MB resident at its end."""
        before = self.cpu_per_step()
        self.turn()
        seconds = self.cpu_per_step() - before
        return 1e3 * seconds / self.steps / self.processes, self.megabytes()


def vectors(folder: Path, steps: int = TURN, **settings: Any) -> Watched:
    """Return a training of the MLP without an end, with turns of so many steps."""
    log_every = settings.get("log_every", 200)
    words = SETTINGS | {"task.name": "vectors", "epochs": "null", "max_steps": NEVER, "log_every": log_every}
    named = {name.replace("__", "."): value for name, value in settings.items()}
    command = [sys.executable, "-m", "benchmarks.growth", "train", *arguments(words | named)]
    return Watched(Side(command, folder, every=steps // log_every), steps)


def compare(
    what: str, small: Watched, large: Watched, warm_ups: tuple[int, int] = (1, 1), own_bytes: int = 0
) -> Iterator[Comparison]:
    """Compare them after as many turns as `warm_ups` says. `own_bytes`: of the large one's memory, not to be
    counted."""
    with running(small, large):
        for side, turns in zip((small, large), warm_ups, strict=True):
            side.start()
            for _ in range(turns):
                side.turn()
        theirs, ours = in_turn(ROUNDS, small.measured_turn, large.measured_turn)
    yield from rows(what, [(time, size - own_bytes / 1e6) for time, size in ours], theirs, TARGET)


def rows(
    what: str, ours: list[tuple[float, float]], theirs: list[tuple[float, float]], target: float
) -> Iterator[Comparison]:
    """Return two rows about measured turns: time and memory."""
    (own_times, own_sizes), (times, sizes) = (map(list, zip(*turns, strict=True)) for turns in (ours, theirs))
    yield Comparison(f"growth: CPU per step, {what}", "ms", own_times, times, target, is_gain=False)
    yield Comparison(f"growth: memory, {what}", "MB", own_sizes, sizes, target, is_gain=False)


def steps(folder: Path) -> Iterator[Comparison]:
    yield from compare("10x the steps", vectors(folder / "1"), vectors(folder / "10"), (1, 10))


def data(folder: Path) -> Iterator[Comparison]:
    small, large = (vectors(folder / f"{n}", task__examples=n * EXAMPLES) for n in (1, 10))
    yield from compare("10x the data", small, large, own_bytes=9 * EXAMPLES * BYTES_PER_EXAMPLE)


def record(folder: Path) -> Iterator[Comparison]:
    often = {"log_every": 20, "eval_every": 40, "save_every": 1_000}
    small, large = (vectors(folder / f"{n}", 2_000, **often) for n in (1, 10))
    yield from compare("10x the record", small, large, (3, 30))


def kept(folder: Path) -> Iterator[Comparison]:
    small, large = (vectors(folder / f"{n}", save_every=200, checkpoint__keep_last=n) for n in (2, 20))
    yield from compare("10x the checkpoints", small, large)


def processes(folder: Path) -> Iterator[Comparison]:
    write_images(folder / "images", 4 * BATCH * INTERVAL * (2 + ROUNDS))
    settings = CNN | {"task.data_dir": folder / "images", "task.dropout": 0, "log_every": INTERVAL}
    sides = []
    for n in (1, 4):
        own = settings | {"global_batch_size": BATCH * n}
        ours = Side(train_py(own, "ddp" if n > 1 else "cpu", n), folder / f"{n}")
        sides += [Watched(side, INTERVAL, n) for side in (ours, plain_ddp(own, folder / f"plain {n}", n))]
    with running(*sides):
        for side in sides:
            side.start()
            side.turn()
        small, plain_small, large, plain_large = in_turn(ROUNDS, *(side.measured_turn for side in sides))
    yield from rows("4x the processes", large, small, TARGET)
    growth, plain_growth = (
        [many / one for (many, _), (one, _) in zip(*turns, strict=True)]
        for turns in ((large, small), (plain_large, plain_small))
    )
    yield Comparison("growth with 4x the processes, plain DDP", "times", growth, plain_growth, TARGET, is_gain=False)


def long(folder: Path) -> Iterator[Comparison]:
    often = {"log_every": 1_000, "eval_every": 5_000, "save_every": 10_000}
    early, late = (vectors(folder / name, **often) for name in ("early", "late"))
    tenth = LONG // 10 // TURN  # turns
    with running(early, late):
        late.start()
        for _ in range(9):
            measured = [late.measured_turn() for _ in range(tenth)]
            milliseconds, megabytes = (statistics.median(values) for values in zip(*measured, strict=True))
            print(f"{len(late.seconds) * TURN:,} steps: {milliseconds:.4f} ms, {megabytes:.1f} MB", flush=True)
        early.start()
        for _ in range(tenth):
            early.turn()
        theirs, ours = in_turn(tenth, early.measured_turn, late.measured_turn)
    yield from rows(f"last tenth of {LONG:,} steps, second one", ours, theirs, DRIFT)


QUESTIONS = {question.__name__: question for question in (steps, data, record, kept, processes, long)}


def measure(_: Path, folder: Path, only: list[str]) -> list[Comparison]:
    found: list[Comparison] = []
    for name in only:
        (folder / name).mkdir()
        found += QUESTIONS[name](folder / name)
    return found


if __name__ == "__main__":
    if sys.argv[1:2] == ["train"]:
        TASKS["vectors"] = "benchmarks.growth:Vectors"
        del sys.argv[1]
        main()
    else:
        options = pairs.parser(__doc__)
        options.add_argument("--only", nargs="+", choices=QUESTIONS, default=[*QUESTIONS])
        pairs.main(measure, options)
