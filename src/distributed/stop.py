"""A run that is told to end saves first: SIGTERM, SIGINT, SIGUSR1, SIGHUP, or the end of its time."""

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


class StopSignal:
    """Turns signals and max_hours into a request, which the loop honours between steps."""

    def __init__(self, accelerator: Accelerator, config: Config) -> None:
        # from now on, the loop answers them  # room: status
        SIGNALS.answer_by(None)  # room: status
        self._max_hours = config.max_hours
        self._deadline = psutil.Process().create_time() + (config.max_hours or math.inf) * 3600
        # a group of its own, on the CPU: asking all processes must not wait for the device
        self._group: Any = None
        if accelerator.num_processes > 1:
            timeout = timedelta(minutes=config.timeout_minutes)
            self._group = torch.distributed.new_group(backend="gloo", timeout=timeout)
        self._num_processes = accelerator.num_processes
        self._calls, self._calls_per_exchange, self._asked = 0, 1, 0.0

    @property
    def reason(self) -> str | None:
        """Return why this process should stop; None if it was not asked to."""
        return SIGNALS.name or (f"max_hours={self._max_hours:g}" if time.time() > self._deadline else None)

    @property
    def requested(self) -> bool:
        """Return whether this process was asked to stop."""
        return self.reason is not None

    def begin_sum(self, values: list[float]) -> Callable[[], list[float]]:
        """Begin to add up numbers over the processes, on the host: neither waits for the device. Return a function that
        waits for the sums. Collective."""
        if self._group is None:
            return lambda: values
        sums = torch.tensor(values, dtype=torch.float64)
        work = torch.distributed.all_reduce(sums, group=self._group, async_op=True)

        def wait() -> list[float]:
            work.wait()
            return sums.tolist()

        return wait

    def poll(self) -> bool:
        """Return whether any process was asked to stop: the same answer on all, which must call this equally often.
        Collective."""
        self._calls += 1
        if self._calls % self._calls_per_exchange:
            return False
        requests, seconds = self.begin_sum([float(self.requested), time.monotonic() - self._asked])()
        # An exchange takes 0.6 ms, as long as a small batch. So the calls from one to the next double as long as they
        # take less than a second; else the next call exchanges. The seconds are added up, so that all decide alike.
        self._calls_per_exchange = 2 * self._calls_per_exchange if seconds < self._num_processes else 1
        self._asked = time.monotonic()
        return requests > 0
