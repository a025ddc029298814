"""How fast a run trains: the figures perf/… in its records, and profiles of chosen steps. See docs/performance.md."""

import re
import time
from collections import deque
from typing import Any

import torch
from accelerate.utils import gather_object
from torch.profiler import profile, record_function

from src.config.errors import UserError
from src.distributed.accelerator import peak_memory
from src.training.batches import MicroBatch
from src.training.run import Run

PEAKS = {
    "B200": (2250, 1125, 75),
    "H200 NVL": (835, 417, 60),
    "H200": (989, 494, 67),
    "H100 NVL": (835, 417, 60),
    "H100 PCIe": (756, 378, 51),
    "H100": (989, 494, 67),
    "A100": (312, 156, 19.5),
    "L40S": (362, 183, 91.6),
    "L4": (121, 60, 30.3),
    "A10G": (70, 35, 31.5),
    "RTX 4090": (165.2, 82.6, 82.6),
    "MI300X": (1307, 653.7, 163.4),
}
"""Dense 10^12 operations per second in bf16 and fp16 (summed in fp32), in TF32 and in fp32, by words of the device's
name: the first entry that fits counts. From data sheets of AMD and NVIDIA, its Ada whitepaper (4090), AWS (A10G)."""
PARTIAL = {"MIG", "Laptop", "D"}
"""Words in the names of devices that are less than the table says."""


def peak_flops(name: str, precision: str) -> float | None:
    """Return the floating-point operations per second of a device, such as `NVIDIA H100 PCIe`, at most, for matrices in
    this precision: a Launch's. In fp8 they are bf16's. None: it is not in the table."""
    words = {*re.split("[ -]", name)}
    half, tf32, fp32 = next((peak for key, peak in PEAKS.items() if {*key.split()} <= words), (0, 0, 0))
    single = tf32 if torch.backends.cuda.matmul.fp32_precision == "tf32" else fp32
    return 1e12 * (single if precision == "fp32" else half) if half and not words & PARTIAL else None


class Performance:
    """Measures the steps of a run. On a GPU it records events, and reads them once they have passed: between two calls
    of `metrics`, the host never waits for the device."""

    def __init__(self, run: Run) -> None:
        self._run, self._profile = run, Profile(run)
        self._model = run.accelerator.unwrap_model(run.model)
        self._has_events = run.device.type != "cpu"
        name = torch.cuda.get_device_name(run.device) if run.device.type == "cuda" else ""
        self._peak = peak_flops(name, run.launch.precision)
        self._marks: dict[str, Any] = {}
        self._pending: deque[tuple[Any, ...]] = deque()  # steps that the device may not have done yet
        self._totals = [0.0] * 6  # steps; seconds of data, computing and waiting; operations; tokens
        if run.world_size > 1:
            run.model.register_forward_pre_hook(lambda *_: self._mark("forward"), prepend=True)
        if run.world_size > 1 and not run.accelerator.is_fsdp2:  # whose layers wait for each other one by one
            first = next(parameter for parameter in run.parameters if parameter.requires_grad)
            first.register_post_accumulate_grad_hook(lambda _: self._mark("gradient"))
            run.optimizers[0].register_step_pre_hook(lambda *_: self._mark("update"))

    def begin_step(self) -> None:
        """Note that an optimizer step begins, with the wait for its data."""
        self._profile.begin(self._run.progress.step + 1)
        self._began = self._now()

    def begin_computing(self, micro_batches: list[MicroBatch]) -> None:
        """Note that this step's data are there."""
        self._fetched, self._marks, self._micro_batches = self._now(), {}, micro_batches

    def end_step(self) -> None:
        """Note that the step has been taken, or given to the device."""
        end = self._now()
        self._profile.end()
        tokens = sum(batch.weight * batch.counts[1] for batch in self._micro_batches)
        flops = 0.0
        if self._peak:
            count = self._run.task.flops
            flops = sum(batch.weight * count(self._model, batch.data) for batch in self._micro_batches)
        self._pending.append((self._began, self._fetched, self._marks, end, flops, tokens))
        self._read_past()

    def metrics(self) -> dict[str, float]:
        """Return the figures of the steps since the last call. Collective; waits for the device."""
        if self._has_events:
            self._now().synchronize()
            self._read_past()
        rows = gather_object([self._totals])
        self._totals = [0.0] * 6
        steps, data, compute, waiting, flops, tokens = (sum(column) for column in zip(*rows, strict=True))
        metrics = {"perf/data_seconds": data / steps, "perf/compute_seconds": compute / steps}
        if len(rows) > 1:
            metrics["perf/waiting_seconds"] = waiting / steps
            metrics["perf/slowest_process"] = max(range(len(rows)), key=lambda rank: sum(rows[rank][1:3]))
        if tokens:
            metrics["perf/tokens_per_second_per_device"] = tokens / (data + compute + waiting)
        if self._peak and flops:
            metrics["perf/mfu"] = flops / (data + compute + waiting) / self._peak
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

    def _mark(self, name: str) -> None:
        """Keep when a step first comes to `name`; to the first parameter's gradient, when it last does: in the last
        backward pass."""
        if name == "gradient" or name not in self._marks:
            self._marks[name] = self._now()

    def _read_past(self) -> None:
        """Add up the steps that the device has done."""
        while self._pending and (not self._has_events or self._pending[0][3].query()):
            begin, fetched, marks, end, *counts = self._pending.popleft()
            waiting = self._seconds(fetched, marks.get("forward", fetched))
            if "update" in marks:  # the step was taken
                waiting += self._seconds(marks["gradient"], marks["update"])
            seconds = self._seconds(begin, fetched), self._seconds(fetched, end) - waiting, waiting
            self._totals = [total + n for total, n in zip(self._totals, (1, *seconds, *counts), strict=True)]


class Profile:
    """Writes what PyTorch's profiler sees of the steps in `profile_steps` into the run's folder.

    Raises:
        UserError: the run ends before them.
    """

    def __init__(self, run: Run) -> None:
        self._first, self._last = map(int, (run.config.profile_steps or "0:0").split(":"))
        if self._first > run.total_steps:
            says = f"profile_steps={run.config.profile_steps}: the run has only {run.total_steps} steps"
            raise UserError(f"{says}; name some of them, or set it to null")
        self._last = min(self._last, run.total_steps)
        self._folder, self._rank = run.config.folder / "profile", run.rank
        self._has_cuda = run.device.type == "cuda"
        self._profiler: profile | None = None
        self._step: record_function | None = None
        self._left = 0

    def begin(self, number: int) -> None:
        """Begin step `number`: profiled if it is one of the chosen, as `step <number>` in the trace."""
        if not self._first <= number <= self._last:
            return
        if self._profiler is None:
            if self._has_cuda:
                torch.cuda.memory._record_memory_history(max_entries=100_000)
            self._profiler = profile()
            self._profiler.start()
        self._step = record_function(f"step {number}")
        self._step.__enter__()
        self._left = self._last - number

    def end(self) -> None:
        """End the step; after the last of the chosen, write the profile."""
        if self._step is None:
            return
        self._step.__exit__(None, None, None)
        self._step = None
        if self._left == 0 and self._profiler:
            self._profiler.stop()
            self._folder.mkdir(parents=True, exist_ok=True)
            self._profiler.export_chrome_trace(str(self._folder / f"trace_{self._rank}.json"))
            if self._has_cuda:  # https://docs.pytorch.org/docs/stable/torch_cuda_memory.html
                torch.cuda.memory._dump_snapshot(str(self._folder / f"memory_{self._rank}.snapshot"))
                torch.cuda.memory._record_memory_history(enabled=None)
