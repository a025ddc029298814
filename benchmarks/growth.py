"""Growth: what becomes of a step's time and of memory with ten times the data, the steps, four times the processes.

    python -m benchmarks.growth         (prints the fitted slopes too, and draws docs/growth.svg)

The MNIST CNN of configs/mnist.yaml in fp32 without augmentation, one thread per process; each run in fresh processes,
runs of one question in turn, several times. Nothing here should grow, which is a slope of 0 in a log-log fit, but for
- data: as many steps on 6,000, 20,000 and 60,000 images (random ones). Memory is that of the process at its peak
  without the data set itself, 792 bytes an image.
- steps: the first, fifth and last tenth of one long run, which has saves in each. Memory is what
  is resident at the end of each tenth, so that a leak of a few bytes per step shows: a peak would hide it.
- processes: 1, 2 and 4 (ddp.yaml, gloo) with the same micro-batch of each, on bundled digits. More processes than
  cores wait for each other: time is a step's, divided by the number of processes that share a core.

Equal work, which is asserted: the same number of steps and of images per step and process.

Where it could grow: the order of an epoch is drawn at once, for all images; a record, a checkpoint or a bar that keeps
what it has seen; DDP's exchange of 4.8 MB of gradients, which one process doesn't have: it is compared from 2 to 4.
"""

import os
import statistics
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from benchmarks import pairs
from benchmarks.pairs import Comparison
from benchmarks.runs import PROJECT, arguments, launch_command, launched, read_run, write_images

ROUNDS, BATCH = 2, 4
IMAGES, STEPS = (6_000, 20_000, 60_000), 120
LONG, TENTHS = 10 * STEPS, (1, 5, 10)
PROCESSES, STEPS_OF_DIGITS, BATCH_OF_DIGITS = (1, 2, 4), 80, 16
PER_TENTH = 4
"""Records: their median lets a neighbour's burst pass."""
BYTES_PER_IMAGE = 28 * 28 + 8
FILE = PROJECT / "docs" / "growth.svg"
Curve = dict[int, tuple[float, float]]
"""By what grows: seconds per step, and bytes."""


@contextmanager
def resident(metrics: Path) -> Iterator[dict[int, int]]:
    """Yields: bytes of the training process that `launched` starts meanwhile, by the number of records, when there
    first were so many: what the end of the run takes, with its export, comes after the last."""
    found: dict[int, int] = {}
    is_over = threading.Event()

    def watch() -> None:
        while not is_over.wait(0.05):
            try:
                (launcher,) = psutil.Process().children()
                trainer, *_ = launcher.children()
                found.setdefault(metrics.read_bytes().count(b"\n"), trainer.memory_info().rss)
            except (ValueError, OSError, psutil.Error):  # not yet there, or no longer
                continue

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        yield found
    finally:
        is_over.set()
        watcher.join()


def run(steps: int, processes: int = 1, batch: int = BATCH, **task: Any) -> tuple[list[float], list[int], list[int]]:
    """Returns: seconds per step in each tenth, bytes resident at the end of each, the peak of each process."""
    settings = {
        "config": PROJECT / "configs" / "mnist.yaml",
        "task.shift": 0,
        "task.rotation": 0,
        "global_batch_size": batch * processes,
        "epochs": 100,
        "max_steps": steps,
        "log_every": steps // (10 * PER_TENTH),
        "save_every": steps // 20,  # the first one, which imports and allocates, within the first tenth
        "eval_every": 1_000_000,
        "wandb.mode": "disabled",
        **{f"task.{name}": value for name, value in task.items()},
    }
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder, "run")
        command = [*launch_command("cpu" if processes == 1 else "ddp", processes), "train.py"]
        with resident(output / "metrics.jsonl") as seen:
            launched([*command, *arguments(settings | {"output_dir": output})])
        found = read_run(output)
    summary, ends = found.summary, [tenth * PER_TENTH for tenth in range(1, 11)]
    assert (summary["step"], summary["num_processes"], summary["precision"]) == (steps, processes, "fp32")
    assert len(found.records) == ends[-1]
    speeds = [record["perf/samples_per_second"] for record in found.records]
    times = [batch * processes / statistics.median(speeds[end - PER_TENTH : end]) for end in ends]
    return times, [seen[max(n for n in seen if n < end)] for end in ends], summary["peak_memory_bytes"]


def with_data(folder: Path) -> list[Curve]:
    """One curve per round."""
    for count in IMAGES:
        write_images(folder / str(count), count)
    rounds = []
    for _ in range(ROUNDS):
        curve = {}
        for count in IMAGES:
            times, _, (peak,) = run(STEPS, data_dir=folder / str(count))
            curve[count] = statistics.median(times[1:]), float(peak - count * BYTES_PER_IMAGE)
        rounds.append(curve)
    return rounds


def with_steps(folder: Path) -> list[Curve]:
    rounds = []
    for _ in range(ROUNDS):
        times, sizes, _ = run(LONG, data_dir=folder / str(IMAGES[0]))
        rounds.append({n * LONG // 10: (times[n - 1], float(sizes[n - 1])) for n in TENTHS})
    return rounds


def with_processes() -> list[Curve]:
    cores = len(os.sched_getaffinity(0))
    rounds = []
    for _ in range(ROUNDS):
        curve = {}
        for processes in PROCESSES:
            times, _, peaks = run(STEPS_OF_DIGITS, processes, BATCH_OF_DIGITS, source="digits")
            curve[processes] = statistics.median(times[1:]) * min(1, cores / processes), float(max(peaks))
        rounds.append(curve)
    return rounds


def slope(rounds: list[Curve], value: int) -> float:
    """Of the medians: 0 is flat, 1 is in proportion."""
    sizes = list(rounds[0])
    medians = [statistics.median(curve[size][value] for curve in rounds) for size in sizes]
    return float(np.polyfit(np.log(sizes), np.log(medians), 1)[0])


def draw(questions: dict[str, list[Curve]]) -> None:
    import matplotlib as mpl
    from matplotlib import pyplot as plt

    mpl.use("svg")
    mpl.rcParams |= {"svg.fonttype": "none", "svg.hashsalt": "growth", "font.size": 9}
    figure, panels = plt.subplots(1, 3, figsize=(9, 3), sharey=True, layout="constrained")
    for panel, (name, rounds) in zip(panels, questions.items(), strict=True):
        sizes = list(rounds[0])
        for value, what, marker in ((0, "time per step", "o"), (1, "memory of a process", "s")):
            medians = np.array([statistics.median(curve[size][value] for curve in rounds) for size in sizes])
            label = f"{what}, slope {slope(rounds, value):+.3f}"
            panel.plot(sizes, medians / medians[0], marker=marker, label=label)
        panel.set(xscale="log", xlabel=name, ylim=(0, 2), title=f"{sizes[-1] / sizes[0]:g}x the {name}")
        panel.set_xticks(sizes, [f"{size:,}" for size in sizes])
        panel.minorticks_off()
        panel.axhline(1, color="gray", linewidth=0.5)
        panel.legend(loc="lower left", fontsize=8)
    panels[0].set_ylabel("times as much as at the left")
    figure.savefig(FILE, metadata={"Date": None})


def measure(data_dir: str) -> list[Comparison]:
    with tempfile.TemporaryDirectory() as folder:
        questions = {"images": with_data(Path(folder)), "steps": with_steps(Path(folder))}
    questions["processes"] = with_processes()
    comparisons = []
    for name, rounds in questions.items():
        print(f"{name:<9}  slope of time {slope(rounds, 0):+.3f}, of memory {slope(rounds, 1):+.3f}", flush=True)
        small, *_, large = list(rounds[0])[1 if name == "processes" else 0 :]
        for value, what, unit, scale, target in (
            (0, "time per step", "ms", 1e3, 1.05),
            (1, "memory", "MB", 1e-6, 1.02),
        ):
            ours, theirs = ([scale * curve[size][value] for curve in rounds] for size in (large, small))
            question = f"growth: {what}, {large / small:g}x the {name}"
            comparisons.append(Comparison(question, unit, ours, theirs, target, is_gain=False))
    draw(questions)
    return comparisons


if __name__ == "__main__":
    pairs.main(measure, __doc__)
