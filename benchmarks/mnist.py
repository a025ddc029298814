"""MNIST, the reference work: seconds per epoch, and until 99% of the test images are right, against pytorch/examples.

    python -m benchmarks.mnist [--data_dir=DIR] [--peer=FILE] [--epochs=N]

Theirs is that example's main.py, on the CPU, if you name your own download of it
(https://github.com/pytorch/examples/tree/main/mnist); else mnist_peer.py, which was written here from its description.
Ours is configs/mnist_reference.yaml, its recipe, in bf16 and in fp32. They take turns of an epoch with its test;
start-up and the first ten steps are apart. Then, alone, configs/mnist_fast.yaml, against what theirs took until it
first said 99%.

Five epochs; with --epochs=14 the whole recipe, half an hour. Where the CPU has no bf16, all is fp32. Asserted: the same
number of images, steps and parameters, and after the last epoch an accuracy that is no more than 0.3 points lower than
theirs by then (0.1 after all 14; one seed's accuracy after 5 epochs varies by 0.1).
"""

import re
import signal
import sys
from pathlib import Path
from typing import Any

from benchmarks import pairs
from benchmarks.pairs import Comparison
from benchmarks.runs import CORES, PROJECT, Side, has_bf16, own, running, train_py
from src.tasks.mnist import mnist

STEPS, TESTED = 938, 10_000
TARGETS = {"bf16": 2.5, "fp32": 1.3}
TEN_STEPS = re.compile(r"^(Train Epoch: 1 \[640/|step +10/)", re.MULTILINE)


def begin(side: Side) -> None:
    """Start it, and stop it after ten steps, in front of its first turn, which is an epoch with its test."""
    side.start()
    side.wait(lambda: TEN_STEPS.search(side.log) is not None)
    side.signal(signal.SIGSTOP)


def theirs(data_dir: Path, folder: Path, epochs: int, script: Path | None) -> Side:
    """Return their training, by the user's own `script` if there is one; it reads its images from ../data."""
    (folder / "data" / "MNIST").mkdir(parents=True)
    (folder / "data" / "MNIST" / "raw").symlink_to(next(data_dir.rglob("train-images-idx3-ubyte")).parent)
    by_them = [sys.executable, str(script.resolve()), "--no-accel", f"--epochs={epochs}"] if script else []
    ends = rf"(?:Accuracy|right): (\d+)/{TESTED}"
    return Side(by_them or own("mnist_peer", "../data", epochs), folder / "theirs", CORES, ends=ends, file="log")


def ours(data_dir: Path, folder: Path, config: str, precision: str, **settings: Any) -> Side:
    settings |= {"config": PROJECT / "configs" / f"{config}.yaml", "task.data_dir": data_dir, "log_every": 10}
    return Side(train_py(settings, precision=precision), folder, CORES, ends=r'"eval/accuracy": ([\d.]+)')


def measure(data_dir: Path, folder: Path, epochs: int, peer: Path | None) -> list[Comparison]:
    mnist(str(data_dir))  # downloads it where it is missing
    precisions = [precision for precision in TARGETS if precision != "bf16" or has_bf16()]
    steps = epochs * STEPS
    their_run = theirs(data_dir, folder, epochs, peer)
    recipes = [ours(data_dir, folder / name, "mnist_reference", name, max_steps=steps) for name in precisions]
    runs = (their_run, *recipes)
    with running(*runs):
        for run in runs:
            begin(run)
        for _ in range(epochs):
            for run in runs:
                run.turn()
        for run in runs:
            run.finish()
    reached = [right / TESTED for right in their_run.values]
    for run, precision in zip(recipes, precisions, strict=True):
        last, expected, summary = run.values[-1], reached[-1], run.output.summary
        assert last > expected - (0.001 if epochs == 14 else 0.003), f"{precision}: {last}, theirs {expected}"
        assert (summary["epoch"], summary["step"], summary["precision"]) == (epochs, steps, precision)
        assert summary["parameters"] == 1_199_882
    first = next((i for i, accuracy in enumerate(reached, start=1) if accuracy >= 0.99), epochs)
    times = []
    for seed in range(2):
        fast = ours(data_dir, folder / f"fast-{seed}", "mnist_fast", precisions[0], seed=seed)
        with running(fast):
            begin(fast)
            while not fast.values or fast.values[-1] < 0.99:
                fast.turn()
        times.append(sum(fast.seconds))
    needed = [sum(their_run.seconds[:first])] * len(times)
    rows = [Comparison("MNIST, until 99%", "s", times, needed, 6, is_gain=True)]
    for run, precision in zip(recipes, precisions, strict=True):
        question = f"MNIST, reference recipe, {precision}: epoch"
        rows.append(Comparison(question, "s", run.seconds, their_run.seconds, TARGETS[precision], is_gain=True))
    return rows


if __name__ == "__main__":
    epochs = {"type": int, "default": 5, "help": "how many of the recipe's 14"}
    peer = {"type": Path, "help": "your own download of pytorch/examples' mnist/main.py"}
    pairs.main(measure, __doc__, epochs=epochs, peer=peer)
