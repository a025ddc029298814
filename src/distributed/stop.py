"""A run that is stopped saves first: by SIGTERM, SIGINT, SIGUSR1, SIGHUP or max_hours."""

import math
import time
from collections.abc import Callable
from typing import Any

import torch
from accelerate import Accelerator

from src.config.config import Config
from src.distributed.accelerator import first_timeout
from src.distributed.process import SIGNALS

Sums = dict[str, float]
"""Numbers by name."""


class StopSignal:
    """Turns signals and max_hours into a request to stop, which all processes honour between the same steps.

    The request is summed together with numbers that the host needs while the device works. They go through gloo: NCCL
    would queue them behind the device's work, and reading them would make the host wait for all of it.
    """

    def __init__(self, accelerator: Accelerator, config: Config) -> None:
        SIGNALS.answer_by(None)  # from now on, the loop answers them
        self._max_hours = config.max_hours or math.inf
        self._num_processes = accelerator.num_processes
        self.group: Any = None
        """Of its sums; None: the default one."""
        # on a CPU that is gloo's already: each group has a thread that wakes up every 10 ms, also if it has no work
        if accelerator.device.type != "cpu" and self._num_processes > 1:
            # until `fit` sets what holds after the first step
            self.group = torch.distributed.new_group(backend="gloo", timeout=first_timeout(config))
        self._request = self.begin_sum({})

    @property
    def reason(self) -> str | None:
        """Return why this process should stop; None if it need not."""
        is_due = time.monotonic() - SIGNALS.since > 3600 * self._max_hours
        return SIGNALS.name or (f"max_hours={self._max_hours:g}" if is_due else None)

    def begin_sum(self, values: Sums) -> Callable[[], tuple[Sums, bool]]:
        """Begin to sum the values, whose names are the same on all processes. Return a function that waits for the
        sums, and for whether any process was asked to stop before this call. Collective."""
        numbers = torch.tensor([*values.values(), float(self.reason is not None)], dtype=torch.float64)
        gathered, work = numbers, None
        if self._num_processes > 1:
            gathered = numbers.repeat(self._num_processes)
            # an all-reduce would be twice as many messages, and cost a step of the MNIST CNN 1% of its time
            work = torch.distributed.all_gather_into_tensor(gathered, numbers, group=self.group, async_op=True)

        def wait() -> tuple[Sums, bool]:
            if work:
                work.wait()
            *sums, requests = gathered.view(self._num_processes, -1).sum(0).tolist()
            return dict(zip(values, sums, strict=True)), requests > 0

        return wait

    def any_requested(self) -> bool:
        """Return whether any process was asked to stop before the last call: the same answer on all, which must call
        this equally often. Collective."""
        # An exchange takes 0.6 ms, as long as a small batch: it goes on while the batch after this call is computed.
        _, is_requested = self._request()
        self._request = self.begin_sum({})
        return is_requested
