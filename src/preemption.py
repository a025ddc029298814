"""A run that is told to end saves first: SIGTERM, SIGINT, SIGUSR1, or the end of its time."""

import math
import os
import socket
import sys
import threading
import time
from datetime import timedelta
from typing import Any

import psutil
import torch
from accelerate import Accelerator
from accelerate.utils import gather_object

from src.config import Config
from src.process import GRACE_SECONDS, SIGNALS
from src.terminal import say

ASK_SECONDS = 0.5
"""How long an evaluation goes on before its processes ask each other again whether to stop."""


class StopSignal:
    """A context manager that turns signals and max_hours into a request, which the loop honours between steps.

    The death of another process of the run on this machine ends this one, after a grace period: if blocked in a
    collective, it would notice neither that nor a signal.
    """

    def __init__(self, accelerator: Accelerator, config: Config) -> None:
        self._max_hours = config.max_hours
        self._deadline = psutil.Process().create_time() + (config.max_hours or math.inf) * 3600
        here = socket.gethostname(), os.environ.get("GROUP_RANK")  # containers can share the first, not both
        self._others = [
            psutil.Process(pid)
            for where, pid in gather_object([(here, os.getpid())])
            if where == here and pid != os.getpid()
        ]
        # a group of its own, on the CPU: asking all processes must not wait for the device
        self._group: Any = None
        if accelerator.num_processes > 1:
            timeout = timedelta(minutes=config.timeout_minutes)
            self._group = torch.distributed.new_group(backend="gloo", timeout=timeout)
        self._world_size = accelerator.num_processes
        self._calls, self._calls_between, self._asked = 0, 1, time.monotonic()
        self._left = threading.Event()

    @property
    def reason(self) -> str | None:
        """Why this process should stop; None if it was not asked to."""
        return SIGNALS.name or (f"max_hours={self._max_hours:g}" if time.time() > self._deadline else None)

    @property
    def requested(self) -> bool:
        """Whether this process was asked to stop."""
        return self.reason is not None

    def sum_over_processes(self, values: list[float]) -> list[float]:
        """Return the sums of numbers on the host, for which this doesn't wait for the device. Collective."""
        if self._group is None:
            return values
        sums = torch.tensor(values, dtype=torch.float64)
        torch.distributed.all_reduce(sums, group=self._group)
        return sums.tolist()

    def poll(self) -> bool:
        """Return whether any process was asked to stop: the same answer on all, which must call this equally often. The
        calls between two exchanges double until they take ASK_SECONDS. Collective."""
        if self._group is None:
            return self.requested
        self._calls += 1
        if self._calls < self._calls_between:
            return False
        requests, seconds = self.sum_over_processes([float(self.requested), time.monotonic() - self._asked])
        calls = self._calls * ASK_SECONDS * (self._world_size / max(seconds, 1e-6))
        self._calls_between = max(1, int(min(2 * self._calls_between, calls)))
        self._calls, self._asked = 0, time.monotonic()
        return requests > 0

    def __enter__(self) -> "StopSignal":
        SIGNALS.answer_by(None)  # from now on, the loop does
        if self._others:
            threading.Thread(target=self._watch_others, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._left.set()

    def _watch_others(self) -> None:
        while not self._left.wait(0.5):
            if not all(map(_is_alive, self._others)) and not self._left.wait(GRACE_SECONDS):
                say("train.py: another process of this run died", file=sys.stderr)
                os._exit(1)


def _is_alive(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.Error:
        return False
