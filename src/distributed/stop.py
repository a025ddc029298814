"""A run that is stopped saves first: by SIGTERM, SIGINT, SIGUSR1, SIGHUP or max_hours."""

import math
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
from accelerate import Accelerator

from src.config.config import Config
from src.distributed.process import SIGNALS

Sums = dict[str, float]
"""Numbers by name."""


class HostSums:
    """All-reduces numbers that the host needs while the device works.

    They go through gloo: NCCL would queue them behind the device's work, and reading them would make the host wait for
    all of it.
    """

    def __init__(self, accelerator: Accelerator, timeout_minutes: float) -> None:
        self._is_alone = accelerator.num_processes == 1
        self._group: Any = None  # the default one
        # on a CPU that is gloo's already: each group has a thread that wakes up every 10 ms, also if it has no work
        if accelerator.device.type != "cpu" and not self._is_alone:
            timeout = timedelta(minutes=timeout_minutes)
            self._group = torch.distributed.new_group(backend="gloo", timeout=timeout)

    def begin(self, values: Sums) -> Callable[[], Sums]:
        """Begin to sum the values, whose names are the same on all processes. Return a function that waits for the
        sums. Collective."""
        if self._is_alone:
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
        self._deadline = SIGNALS.since + (config.max_hours or math.inf) * 3600
        self._begin()

    @property
    def reason(self) -> str | None:
        """Return why this process should stop; None if it need not."""
        return SIGNALS.name or (f"max_hours={self._max_hours:g}" if time.monotonic() > self._deadline else None)

    def any_requested(self) -> bool:
        """Return whether any process was asked to stop before the last call: the same answer on all, which must call
        this equally often. Collective."""
        # An all-reduce takes 0.6 ms, as long as a small batch: it goes on while the batch after this call is computed.
        requests = self._summed()["requests"]
        self._begin()
        return requests > 0

    def _begin(self) -> None:
        self._summed = self.sums.begin({"requests": float(self.reason is not None)})
