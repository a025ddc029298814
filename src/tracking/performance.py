"""Measure how fast a run trains: the metrics perf/… and profiles of chosen steps. See docs/performance.md."""

import re
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate.utils import gather_object
from torch.profiler import profile, schedule, tensorboard_trace_handler

from src.config.settings import read_yaml
from src.distributed.accelerator import peak_memory
from src.tasks.base import Counts
from src.training.batches import Fetched, MicroBatch, TrainStep
from src.training.progress import StepResult
from src.training.run import Run

PEAKS: dict[str, float] = read_yaml(Path(__file__).with_name("peaks.yaml").read_bytes())
"""Peak dense TFLOPS in half precision by words of a device's name: the first match counts."""
PARTIAL = {"MIG", "Laptop", "D"}
"""Words in the names of devices that are slower than the table says."""


def peak_flops(name: str, precision: str) -> float | None:
    """Return the peak FLOPS of a device, such as `NVIDIA H100 PCIe`, for matrix products in a RunSetup's precision (for
    fp8, those of bf16). None: the device is not in the table, or the precision is fp32."""
    words = {*re.split("[ -]", name)}
    if precision == "fp32" or words & PARTIAL:
        return None
    return next((1e12 * peak for key, peak in PEAKS.items() if {*key.split()} <= words), None)


def measure(run: Run, steps: Fetched, take_step: TrainStep) -> tuple[Fetched, TrainStep]:
    """Return the steps, and what takes them, with measurements around both."""
    performance = Performance(run)

    def fetch() -> Fetched:
        while True:
            performance.begin_step()
            step = next(steps)
            performance.begin_computing()
            yield step

    def take(run: Run, micro_batches: list[MicroBatch], counts: Counts) -> StepResult:
        result = take_step(run, micro_batches, counts)
        performance.end_step(micro_batches)
        return result._replace(measured=performance.interval_metrics()) if run.is_logged() else result

    return fetch(), take


class Performance:
    """Measures the steps of a run. On a GPU it records events: the host waits for
    the device in `interval_metrics` alone."""

    def __init__(self, run: Run) -> None:
        self._run, self._profiler = run, start_profiler(run)
        self._model = run.accelerator.unwrap_model(run.model)
        self._has_events = run.device.type != "cpu"
        name = torch.cuda.get_device_name(run.device) if run.device.type == "cuda" else ""
        self._peak = peak_flops(name, run.launch.precision)
        self._steps: list[tuple[Any, ...]] = []  # of this interval: begin, data's arrival, end, FLOPs

    def begin_step(self) -> None:
        """Mark the start of a step, which waits for its data first."""
        self._began = self._now()

    def begin_computing(self) -> None:
        """Mark the arrival of the step's data."""
        self._fetched = self._now()

    def end_step(self, micro_batches: list[MicroBatch]) -> None:
        """Mark the end of the step, on a GPU in its stream, and count the FLOPs of its micro-batches."""
        end = self._now()
        if self._profiler:
            self._profiler.step()
        count = self._run.task.flops
        flops = sum(batch.weight * count(self._model, batch.data) for batch in micro_batches if self._peak)
        self._steps.append((self._began, self._fetched, end, flops))

    def interval_metrics(self) -> dict[str, float]:
        """Return the metrics of the steps since the last call. Collective; wait for the device."""
        if self._has_events:
            self._now().synchronize()
        # per step: seconds for data, seconds of computing, FLOPs
        own = [
            (self._seconds(begin, fetched), self._seconds(fetched, end), f) for begin, fetched, end, f in self._steps
        ]
        self._steps = []
        data, compute, flops = np.mean(gather_object([np.mean(own, 0)]), 0).tolist()
        metrics = {"perf/data_seconds": data, "perf/compute_seconds": compute}
        if self._peak and flops:
            metrics["perf/mfu"] = flops / (data + compute) / self._peak
        return metrics | {"perf/peak_memory_bytes": max(peak_memory(self._run.accelerator))}

    def _now(self) -> Any:
        """Return the time in seconds, or an event at the end of the device's current work."""
        if not self._has_events:
            return time.perf_counter()
        event = torch.Event(self._run.device, enable_timing=True)
        event.record()
        return event

    def _seconds(self, begin: Any, end: Any) -> float:
        return begin.elapsed_time(end) / 1e3 if self._has_events else end - begin


def start_profiler(run: Run) -> profile | None:
    """Return PyTorch's profiler, which writes profiles of the steps in `profile_steps` into the run's folder; None if
    there are no such steps ahead."""
    steps, total = run.config.profile_steps, run.total_steps
    if steps is None:
        return None
    first, last = map(int, steps.split(":"))
    before, active = first - 1 - run.progress.step, min(last, total) - first + 1
    if before < 0:
        return None
    warmup = min(before, 1)
    chosen = schedule(wait=before - warmup, warmup=warmup, active=active, repeat=1)
    write = tensorboard_trace_handler(str(run.config.folder / "profile"), f"rank_{run.rank}")
    profiler = profile(schedule=chosen, on_trace_ready=write, profile_memory=True)
    profiler.start()
    return profiler
