"""How fast a run trains: the figures perf/… in its records, and profiles of chosen steps. See docs/performance.md."""

import re
import time
from collections import deque
from typing import Any

import numpy as np
import torch
from accelerate.utils import gather_object
from torch.profiler import profile, schedule, tensorboard_trace_handler

from src.config.errors import UserError
from src.distributed.accelerator import peak_memory
from src.training.batches import MicroBatch
from src.training.run import Run

PEAKS = {
    "B200": 2250,
    "H200 NVL": 835,
    "H200": 989,
    "H100 NVL": 835,
    "H100 PCIe": 756,
    "H100": 989,
    "A100": 312,
    "L40S": 362,
    "L4": 121,
    "A10G": 70,
    "RTX 4090": 165.2,
    "MI300X": 1307,
}
"""Dense 10^12 operations per second in bf16 and fp16, summed in fp32, by words of the device's name: the first entry
that fits counts. From data sheets of AMD and NVIDIA, its Ada whitepaper (4090), AWS (A10G)."""
PARTIAL = {"MIG", "Laptop", "D"}
"""Words in the names of devices that are less than the table says."""
NOTHING = np.zeros(4)
"""Totals before the first step: steps; seconds of data and of computing; operations."""


def peak_flops(name: str, precision: str) -> float | None:
    """Return the floating-point operations per second of a device, such as `NVIDIA H100 PCIe`, at most, for matrices in
    this precision: a Launch's. In fp8 they are bf16's. None: it is not in the table, or the precision is fp32."""
    words = {*re.split("[ -]", name)}
    if precision == "fp32" or words & PARTIAL:
        return None
    return next((1e12 * peak for key, peak in PEAKS.items() if {*key.split()} <= words), None)


class Performance:
    """Measures the steps of a run. On a GPU it records events, and reads them once they have passed: between two calls
    of `metrics`, the host never waits for the device."""

    def __init__(self, run: Run) -> None:
        self._run, self._profiler = run, start_profiler(run)
        self._model = run.accelerator.unwrap_model(run.model)
        self._has_events = run.device.type != "cpu"
        name = torch.cuda.get_device_name(run.device) if run.device.type == "cuda" else ""
        self._peak = peak_flops(name, run.launch.precision)
        self._pending: deque[tuple[Any, ...]] = deque()  # steps that the device may not have done yet
        self._totals = NOTHING

    def begin_step(self) -> None:
        """Note that an optimizer step begins, with the wait for its data."""
        self._began = self._now()

    def begin_computing(self, micro_batches: list[MicroBatch]) -> None:
        """Note that this step's data are there."""
        self._fetched, self._micro_batches = self._now(), micro_batches

    def end_step(self) -> None:
        """Note that the step has been taken, or given to the device."""
        end = self._now()
        if self._profiler:
            self._profiler.step()
        flops = 0.0
        if self._peak:
            count = self._run.task.flops
            flops = sum(batch.weight * count(self._model, batch.data) for batch in self._micro_batches)
        self._pending.append((self._began, self._fetched, end, flops))
        self._read_past()

    def metrics(self) -> dict[str, float]:
        """Return the figures of the steps since the last call. Collective; waits for the device."""
        if self._has_events:
            self._now().synchronize()
            self._read_past()
        steps, data, compute, flops = sum(gather_object([self._totals])).tolist()
        self._totals = NOTHING
        metrics = {"perf/data_seconds": data / steps, "perf/compute_seconds": compute / steps}
        if self._peak and flops:
            metrics["perf/mfu"] = flops / (data + compute) / self._peak
        return metrics | {"perf/peak_memory_bytes": max(peak_memory(self._run.accelerator))}

    def _now(self) -> Any:
        """Return the time in seconds, or an event for when the device has done what it has been given so far."""
        if not self._has_events:
            return time.perf_counter()
        event = torch.Event(self._run.device, enable_timing=True)
        event.record()
        return event

    def _seconds(self, begin: Any, end: Any) -> float:
        return begin.elapsed_time(end) / 1e3 if self._has_events else end - begin

    def _read_past(self) -> None:
        """Add up the steps that the device has done."""
        while self._pending and (not self._has_events or self._pending[0][2].query()):
            begin, fetched, end, flops = self._pending.popleft()
            step = 1, self._seconds(begin, fetched), self._seconds(fetched, end), flops
            self._totals = self._totals + step


def start_profiler(run: Run) -> profile | None:
    """Return PyTorch's profiler, which writes what it sees of the steps in `profile_steps` into the run's folder; None
    if there are none to come.

    Raises:
        UserError: the run ends before them.
    """
    steps, total = run.config.profile_steps, run.total_steps
    if steps is None:
        return None
    first, last = map(int, steps.split(":"))
    if first > total:
        says = f"profile_steps={steps}: the run has only {total} steps"
        raise UserError(f"{says}; name some of them, or set it to null")

    wait, active = first - 1 - run.progress.step, min(last, total) - first + 1
    if wait < 0:
        return None
    warmup = min(wait, 1)
    chosen = schedule(wait=wait - warmup, warmup=warmup, active=active, repeat=1)
    write = tensorboard_trace_handler(str(run.config.folder / "profile"), f"rank_{run.rank}")
    profiler = profile(schedule=chosen, on_trace_ready=write, profile_memory=True)
    profiler.start()
    return profiler
