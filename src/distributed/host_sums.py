"""Sums over the processes, of numbers that the host needs while the device works."""

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
from accelerate import Accelerator

Sums = dict[str, float]
"""Numbers by name."""


class HostSums:
    """Adds up numbers over the processes, in a gloo group of its own: NCCL would queue that behind the device's work,
    and the host would wait for all of it to read the sums."""

    def __init__(self, accelerator: Accelerator, timeout_minutes: float) -> None:
        self.num_processes = accelerator.num_processes
        self._group: Any = None
        if self.num_processes > 1:
            timeout = timedelta(minutes=timeout_minutes)
            self._group = torch.distributed.new_group(backend="gloo", timeout=timeout)

    def begin(self, values: Sums) -> Callable[[], Sums]:
        """Begin to add up the values, whose names are the same on all processes. Return a function that waits for the
        sums. Collective."""
        if self._group is None:
            return lambda: values
        sums = torch.tensor([*values.values()], dtype=torch.float64)
        work = torch.distributed.all_reduce(sums, group=self._group, async_op=True)

        def wait() -> Sums:
            work.wait()
            return dict(zip(values, sums.tolist(), strict=True))

        return wait
