"""Growth: what becomes of a step's time and of memory with ten times the data, the steps, four times the processes.

    python -m benchmarks.growth         (prints the fitted slopes too, and draws docs/growth.svg)

The MNIST CNN in fp32, one thread per process; each run in fresh processes, twice. Nothing here should grow, which is a
slope of 0 in a log-log fit, but for DDP's exchange, which one process doesn't have: it is compared from 2 to 4.
- images: as many steps on 6,000 to 60,000 random images. Memory is that at the peak without the data set itself.
- steps: the first, fifth and last tenth of one long run, which has saves in each. Memory is what is resident at the end
  of each tenth, so that a leak of a few bytes per step shows.
- processes: 1, 2 and 4 (ddp.yaml, gloo) with the same micro-batch of each, on bundled digits. Time is a step's, divided
  by the number of processes that share a core.
Equal work, which is asserted: the same number of steps and of images per step and process.
"""

import contextlib
import os
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
import psutil
from matplotlib import pyplot as plt

from benchmarks import pairs
from benchmarks.pairs import Comparison
from benchmarks.runs import CNN, PROJECT, Side, running, train_py, write_images

ROUNDS, BATCH = 2, 4
IMAGES, STEPS = (6_000, 20_000, 60_000), 120
TENTHS = (1, 5, 10)
PROCESSES, STEPS_OF_DIGITS, BATCH_OF_DIGITS = (1, 2, 4), 80, 16
PER_TENTH = 4  # records: their median lets a neighbour's burst pass
BYTES_PER_IMAGE = 28 * 28 + 8


def run(steps: int, processes: int = 1, batch: int = BATCH, **task: Any) -> tuple[list[float], list[int], list[int]]:
    """Return seconds per step in each tenth, bytes resident at the end of each, the peak of each process."""
    settings = CNN | {
        "global_batch_size": batch * processes,
        "epochs": 100,
        "max_steps": steps,
        "log_every": steps // (10 * PER_TENTH),
        "save_every": steps // 20,  # the first one, which imports and allocates, within the first tenth
        **{f"task.{name}": value for name, value in task.items()},
    }
    resident: dict[int, int] = {}  # bytes by the number of records, when there first were so many
    with tempfile.TemporaryDirectory() as folder:
        side = Side(train_py(settings, "cpu" if processes == 1 else "ddp", processes), Path(folder))
        with running(side):
            side.start()
            while side.process and side.process.poll() is None:
                with contextlib.suppress(IndexError, psutil.Error):  # not yet there, or no longer
                    trainer = side.process.children()[0]
                    resident.setdefault(len(side.records), trainer.memory_info().rss)
                time.sleep(0.05)
            side.finish()
        summary, records = side.summary, side.records
    ends = [tenth * PER_TENTH for tenth in range(1, 11)]
    assert (summary["step"], summary["num_processes"], summary["precision"]) == (steps, processes, "fp32")
    assert len(records) == ends[-1]
    speeds = [record["perf/samples_per_second"] for record in records]
    times = [batch * processes / statistics.median(speeds[end - PER_TENTH : end]) for end in ends]
    return times, [resident[max(n for n in resident if n < end)] for end in ends], summary["peak_memory_bytes"]


def with_images(folder: Path) -> Iterator[tuple[float, float]]:
    for count in IMAGES:
        times, _, (peak,) = run(STEPS, data_dir=folder / str(count))
        yield statistics.median(times[1:]), peak - count * BYTES_PER_IMAGE


def with_steps(folder: Path) -> Iterator[tuple[float, float]]:
    times, sizes, _ = run(10 * STEPS, data_dir=folder / str(IMAGES[0]))
    yield from ((times[n - 1], sizes[n - 1]) for n in TENTHS)


def with_processes(_: Path) -> Iterator[tuple[float, float]]:
    for processes in PROCESSES:
        times, _resident, peaks = run(STEPS_OF_DIGITS, processes, BATCH_OF_DIGITS, source="digits")
        yield statistics.median(times[1:]) * min(1, len(os.sched_getaffinity(0)) / processes), max(peaks)


QUESTIONS = {
    "images": (IMAGES, with_images),
    "steps": (tuple(n * STEPS for n in TENTHS), with_steps),
    "processes": (PROCESSES, with_processes),
}
"""What grows, its sizes, and what measures seconds per step and bytes for each of them."""


def slopes(sizes: Sequence[int], medians: np.ndarray) -> list[float]:
    """Return those of time and of memory in a log-log fit: 0 is flat, 1 is in proportion."""
    return np.polyfit(np.log(sizes), np.log(medians), 1)[0].tolist()


def draw(medians: dict[str, np.ndarray]) -> None:
    mpl.use("svg")
    mpl.rcParams |= {"svg.fonttype": "none", "svg.hashsalt": "growth", "font.size": 9}
    figure, panels = plt.subplots(1, 3, figsize=(9, 3), sharey=True, layout="constrained")
    for panel, (name, found) in zip(panels, medians.items(), strict=True):
        sizes, _ = QUESTIONS[name]
        of_time, of_memory = slopes(sizes, found)
        panel.plot(sizes, found[:, 0] / found[0, 0], marker="o", label=f"time per step, slope {of_time:+.3f}")
        panel.plot(sizes, found[:, 1] / found[0, 1], marker="s", label=f"memory of a process, slope {of_memory:+.3f}")
        panel.set(xscale="log", xlabel=name, ylim=(0, 2), title=f"{sizes[-1] / sizes[0]:g}x the {name}")
        panel.set_xticks(sizes, [f"{size:,}" for size in sizes])
        panel.minorticks_off()
        panel.axhline(1, color="gray", linewidth=0.5)
        panel.legend(loc="lower left", fontsize=8)
    panels[0].set_ylabel("times as much as at the left")
    figure.savefig(PROJECT / "docs" / "growth.svg", metadata={"Date": None})


def measure(_: Path, folder: Path) -> list[Comparison]:
    medians, rows = {}, []
    for count in IMAGES:
        write_images(folder / str(count), count)
    for name, (sizes, curve) in QUESTIONS.items():
        found = np.array([list(curve(folder)) for _ in range(ROUNDS)])  # shape (rounds, sizes, 2)
        medians[name] = np.median(found, axis=0)
        of_time, of_memory = slopes(sizes, medians[name])
        print(f"{name:<9}  slope of time {of_time:+.3f}, of memory {of_memory:+.3f}", flush=True)
        small = 1 if name == "processes" else 0
        theirs, ours = (found[:, i] * (1e3, 1e-6) for i in (small, -1))
        what = f"{sizes[-1] / sizes[small]:g}x the {name}"
        for value, question, unit, target in ((0, "time per step", "ms", 1.05), (1, "memory", "MB", 1.02)):
            values = ours[:, value].tolist(), theirs[:, value].tolist()
            rows.append(Comparison(f"growth: {question}, {what}", unit, *values, target, is_gain=False))
    draw(medians)
    return rows


if __name__ == "__main__":
    pairs.main(measure, __doc__)
