"""A run that is told to end saves first: SIGTERM, SIGINT, SIGUSR1, the end of its launcher, or of its time."""

from __future__ import annotations

import ctypes
import math
import os
import signal
import sys
import threading
import time
from datetime import timedelta
from types import FrameType
from typing import Any

import psutil
import torch
from accelerate import Accelerator

from src.config import Config

PR_SET_PDEATHSIG = 1
SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)


class StopRequest:
    """As a context manager, turns the signals into a request that the loop answers at the next step boundary.

    A second SIGINT, a second or more after the first, ends the process at once. A launcher that dies (SIGUSR1 ends
    both accelerate's and torch's) would leave its processes behind as orphans: they take it as a request to stop.
    """

    def __init__(self, accelerator: Accelerator, config: Config, launcher: int | None) -> None:
        """Args:
        launcher: its process id, where there is one to outlive.
        """
        self.reason: str | None = None
        self._interrupted = 0.0
        self._max_hours = config.max_hours
        self._deadline = psutil.Process().create_time() + (config.max_hours or math.inf) * 3600
        self._launcher = launcher
        # a group of its own, on the CPU: asking all processes must not wait for the device
        self._group: Any = None
        if accelerator.num_processes > 1:
            timeout = timedelta(minutes=config.timeout_minutes)
            self._group = torch.distributed.new_group(backend="gloo", timeout=timeout)
        self._left = threading.Event()

    @property
    def is_made(self) -> bool:
        """Whether this process was asked to stop."""
        if self.reason is None and time.time() > self._deadline:
            self.reason = f"max_hours={self._max_hours:g}"
        return self.reason is not None

    def is_made_anywhere(self) -> bool:
        """Whether any process was asked to stop: the same answer on all, which call this together."""
        if self._group is None:
            return self.is_made
        asked = torch.tensor(float(self.is_made))
        torch.distributed.all_reduce(asked, group=self._group)
        return asked.item() > 0

    def __enter__(self) -> StopRequest:
        self._previous = {number: signal.signal(number, self._note) for number in SIGNALS}
        if self._launcher is not None:
            threading.Thread(target=self._outlive, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._left.set()
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def _note(self, number: int, _: FrameType | None) -> None:
        name = signal.Signals(number).name
        if name == "SIGINT" and self._interrupted and time.monotonic() > self._interrupted + 1:
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)
        if name == "SIGINT" and not self._interrupted:  # within a second it is the same one, passed on by the launcher
            self._interrupted = time.monotonic()
        self.reason = name

    def _outlive(self) -> None:
        while not self._left.wait(0.5):
            if os.getppid() != self._launcher:
                self.reason = self.reason or "the end of its launcher"
                return


def outlive_signals(_worker: int) -> None:
    """For processes that load data: launchers and terminals signal the whole process group, and the one that trains
    still needs them. They end with it."""
    os.setpgid(0, 0)
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)  # elsewhere torch notices, after 5 seconds
