"""A run that is stopped saves first: by SIGTERM, SIGINT, SIGUSR1, SIGHUP, or the end of its time."""

import math
import time

import psutil
from accelerate import Accelerator

from src.config.config import Config
from src.distributed.host_sums import HostSums
from src.distributed.process import SIGNALS


class StopSignal:
    """Turns signals and max_hours into a request, which the loop honours between steps."""

    def __init__(self, accelerator: Accelerator, config: Config) -> None:
        SIGNALS.answer_by(None)  # from now on, the loop answers them
        self.sums = HostSums(accelerator, config.timeout_minutes)
        """What processes ask each other by: neither they nor the loop wait for the device."""
        self._max_hours = config.max_hours
        self._deadline = psutil.Process().create_time() + (config.max_hours or math.inf) * 3600
        self._calls, self._calls_per_exchange, self._asked = 0, 1, 0.0

    @property
    def reason(self) -> str | None:
        """Return why this process should stop; None if it was not asked to."""
        return SIGNALS.name or (f"max_hours={self._max_hours:g}" if time.time() > self._deadline else None)

    @property
    def requested(self) -> bool:
        """Return whether this process was asked to stop."""
        return self.reason is not None

    def poll(self) -> bool:
        """Return whether any process was asked to stop: the same answer on all, which must call this equally often.
        Collective."""
        self._calls += 1
        if self._calls % self._calls_per_exchange:
            return False
        asked = {"requests": float(self.requested), "seconds": time.monotonic() - self._asked}
        found = self.sums.begin(asked)()
        # An all-reduce takes 0.6 ms, as long as a small batch. So the calls from one to the next double as long as they
        # take less than a second; else the next call reduces. The seconds are added up, so that all decide alike.
        is_soon = found["seconds"] < self.sums.num_processes
        self._calls_per_exchange = 2 * self._calls_per_exchange if is_soon else 1
        self._asked = time.monotonic()
        return found["requests"] > 0
