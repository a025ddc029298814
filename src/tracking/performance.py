"""Measure how fast a run trains: the metrics perf/… and profiles of chosen steps. See docs/performance.md."""

import socket
import time
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate.utils import gather_object
from torch.profiler import profile, schedule, tensorboard_trace_handler

from src.config.settings import read_yaml
from src.distributed.accelerator import peak_memory, sharded_units
from src.tasks.base import Counts
from src.training.batches import Fetched, MicroBatch, TrainStep
from src.training.progress import StepResult
from src.training.run import Run

TABLE = Path(__file__).with_name("gpus.yaml")
"""GPUs with the names and the peaks that `peaks` returns."""
FEWEST, MOST = 10, 100
"""Steps of an interval that is long enough to judge processes by, and the most whose forward passes are timed."""


@cache  # not read at import: it takes 16 ms, which a start on CPUs can do without
def peaks() -> dict[str, dict[str, float]]:
    """Return the peak dense TFLOPS in each precision by the whole name of a device: others are slices of it, or other
    devices."""
    return {name: gpu["tflops"] for gpu in read_yaml(TABLE.read_bytes()).values() for name in gpu["names"]}


def peak_flops(name: str, precision: str) -> float | None:
    """Return the peak FLOPS of a device, such as `NVIDIA H100 PCIe`, for matrix products in a RunSetup's precision (for
    fp8, those of bf16). None: the device is not in the table or has no such products, or the precision is fp32."""
    peak = peaks().get(name, {}).get(precision.replace("fp8", "bf16"))
    return 1e12 * peak if peak and precision != "fp32" else None


def measure(run: Run, steps: Fetched, take_step: TrainStep) -> tuple[Fetched, TrainStep]:
    """Return the steps, and what takes them, with measurements around both. On a GPU they are events in its stream: the
    host waits for the device at the end of an interval alone."""
    profiler, model = start_profiler(run), run.accelerator.unwrap_model(run.model)
    name = torch.cuda.get_device_name(run.device) if run.device.type == "cuda" else ""
    peak = peak_flops(name, run.launch.precision) if name else None
    times: list[Any] = []  # of this step: its beginning, the arrival of its data, forward passes from ... to, its end
    interval: list[Any] = []  # of each step: these times, FLOPs
    named: list[int] = []

    def note(*_: Any) -> None:
        if torch.is_grad_enabled():  # not in an evaluation
            times.append(now(run.device))

    def fetch() -> Fetched:
        while True:
            times.clear()
            note()
            step = next(steps)
            note()
            yield step

    def take(run: Run, micro_batches: list[MicroBatch], counts: Counts) -> StepResult:
        result = take_step(run, micro_batches, counts)
        note()
        if profiler:
            profiler.step()
        flops = sum(batch.weight * run.task.flops(model, batch.data) for batch in micro_batches if peak)
        interval.append(([*times], flops))
        return result._replace(measured=interval_metrics(run, interval, peak, named)) if run.is_logged() else result

    def note_forward(*_: Any) -> None:
        if len(interval) < MOST:
            note()

    if run.world_size > 1:
        # All take as long as the slowest, for which they wait in collectives. Within these modules there are none: FSDP
        # gathers their weights in a hook of its own, before `note`.
        for unit in sharded_units(run.model)[1:] or [model]:
            unit.register_forward_pre_hook(note_forward)
            unit.register_forward_hook(note_forward, prepend=True)
    return fetch(), take


def interval_metrics(run: Run, interval: list[Any], peak: float | None, named: list[int]) -> dict[str, float]:
    """Return the metrics of an interval's steps, and clear it. On several processes, say which one the others wait for,
    once: `named` has those of whom it was said. Collective; wait for the device."""
    if run.device.type != "cpu":
        now(run.device).synchronize()
    found = []
    for times, flops in interval:
        gaps = [*map(seconds, times, times[1:])]  # the first, and every other one from there: of the process itself
        found.append((gaps[0], sum(gaps[1:]), flops, sum(gaps[::2])))
    interval.clear()
    # of its own time the median, so that no single step counts, such as the one that compiles
    *means, own = np.transpose(gather_object([(*np.mean(found, 0)[:3], np.median(found[:MOST], 0)[3])]))
    data, compute, flops = np.mean(means, 1).tolist()
    slowest, mean = int(own.argmax()), own.mean()
    metrics = {
        "perf/data_seconds": data,
        "perf/compute_seconds": compute,
        "perf/step_seconds": data + compute,
        "perf/own_seconds": mean,
        "perf/own_seconds_max": own.max(),
    }
    if len(found) >= FEWEST and own.max() - mean > max(0.1 * mean, 0.02 * (data + compute)):
        metrics["perf/slowest_rank"] = slowest
        if slowest not in named and run.device.type != "cpu":  # where processes compete for the cores
            named.append(slowest)
            host = gather_object([socket.gethostname()])[slowest]
            its = f"{own.max():.3f} s a step for its data and forward passes, {own.max() / mean - 1:.0%} longer"
            run.tell(f"WARNING: process {slowest} on {host} takes {its} than the mean of all, who wait for it")
    if peak and flops:
        metrics["perf/mfu"] = flops / (data + compute) / peak
    return metrics | {"perf/peak_memory_bytes": max(peak_memory(run.accelerator))}


def now(device: torch.device) -> Any:
    """Return the time in seconds, or an event at the end of the device's current work."""
    if device.type == "cpu":
        return time.perf_counter()
    event = torch.Event(device, enable_timing=True)
    event.record()
    return event


def seconds(begin: Any, end: Any) -> float:
    """Return the seconds between two results of `now`."""
    return end - begin if isinstance(end, float) else begin.elapsed_time(end) / 1e3


def start_profiler(run: Run) -> profile | None:
    """Return PyTorch's profiler, which writes profiles of the steps in `profile_steps` into the run's folder; None if
    there are no such steps ahead."""
    steps = run.config.profile_steps
    if steps is None:
        return None
    first, last = map(int, steps.split(":"))
    before, active = first - 1 - run.progress.step, min(last, run.total_steps) - first + 1
    if before < 0:
        return None
    warmup = min(before, 1)
    chosen = schedule(wait=before - warmup, warmup=warmup, active=active, repeat=1)
    write = tensorboard_trace_handler(str(run.config.folder / "profile"), f"rank_{run.rank}")
    profiler = profile(schedule=chosen, on_trace_ready=write, profile_memory=True)
    profiler.start()
    return profiler
