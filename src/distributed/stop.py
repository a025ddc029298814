"""A run that is stopped saves first: by SIGTERM, SIGINT, SIGUSR1, SIGHUP or max_hours."""

import math
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import psutil
import torch
from accelerate import Accelerator

from src.config.config import Config
from src.distributed.process import SIGNALS

Sums = dict[str, float]
"""Numbers by name."""


class HostSums:
    """All-reduces numbers that the host needs while the device works.

    They go through a gloo group of their own: NCCL would queue them behind the device's work, and reading them would
    make the host wait for all of it.
    """

    def __init__(self, accelerator: Accelerator, timeout_minutes: float) -> None:
        self.num_processes = accelerator.num_processes
        self._group: Any = None
        if self.num_processes > 1:
            timeout = timedelta(minutes=timeout_minutes)
            self._group = torch.distributed.new_group(backend="gloo", timeout=timeout)

    def begin(self, values: Sums) -> Callable[[], Sums]:
        """Begin to sum the values, whose names are the same on all processes. Return a function that waits for the
        sums. Collective."""
        if self._group is None:
            return lambda: values
        sums = torch.tensor([*values.values()], dtype=torch.float64)
        work = torch.distributed.all_reduce(sums, group=self._group, async_op=True)

        def wait() -> Sums:
            work.wait()
            return dict(zip(values, sums.tolist(), strict=True))

        return wait


class StopSignal:
    """Turns signals and max_hours into a request, which the loop honours between steps."""

    def __init__(self, accelerator: Accelerator, config: Config) -> None:
        SIGNALS.answer_by(None)  # from now on, the loop answers them
        self.sums = HostSums(accelerator, config.timeout_minutes)
        """Carries the request to all processes: neither they nor the loop wait for the device."""
        self._max_hours = config.max_hours
        self._deadline = psutil.Process().create_time() + (config.max_hours or math.inf) * 3600
        self._calls, self._calls_per_reduction, self._reduced = 0, 1, 0.0

    @property
    def reason(self) -> str | None:
        """Return why this process should stop; None if it need not."""
        return SIGNALS.name or (f"max_hours={self._max_hours:g}" if time.time() > self._deadline else None)

    @property
    def requested(self) -> bool:
        """Return whether this process was asked to stop."""
        return self.reason is not None

    def any_requested(self) -> bool:
        """Return whether any process was asked to stop: the same answer on all, which must call this equally often.
        Collective."""
        self._calls += 1
        if self._calls % self._calls_per_reduction:
            return False
        sums = self.sums.begin({"requests": float(self.requested), "seconds": time.monotonic() - self._reduced})()
        # An all-reduce takes 0.6 ms, as long as a small batch. So double the calls between two of them as long as these
        # take less than a second, and start over at one otherwise. The seconds are summed so that all decide alike.
        is_soon = sums["seconds"] < self.sums.num_processes
        self._calls_per_reduction = 2 * self._calls_per_reduction if is_soon else 1
        self._reduced = time.monotonic()
        return sums["requests"] > 0
