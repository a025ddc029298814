"""An exponential moving average of the weights: `ema.decay`."""

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.swa_utils import get_ema_multi_avg_fn

from src.config.config import Config
from src.distributed.accelerator import sharded_units
from src.training.gradients import to_local
from src.training.run import Run


class Average(Optimizer):
    """Averages the trained parameters of a model, as an optimizer whose state is the average: like the state of others,
    it is in fp32, sharded as the parameters are, and part of each checkpoint. It starts as the weights after the first
    step.

    torch's AveragedModel does the same to a copy of the model, but FSDP2 refuses to be copied.
    """

    def __init__(self, model: nn.Module, decay: float, is_evaluated: bool) -> None:
        self._model, self._update, self._is_evaluated = model, get_ema_multi_avg_fn(decay), is_evaluated
        # as a fused one: on a GPU the host does not wait for the norm, so steps that were skipped count as well
        super().__init__([p for p in model.parameters() if p.requires_grad], {"lr": 0.0, "fused": True})

    @torch.no_grad()
    def step(self, *_: Any) -> None:  # type: ignore[override]  # without a closure
        """Move the averages towards the weights."""
        parameters = self.param_groups[0]["params"]
        for parameter in parameters:
            if parameter not in self.state:
                self.state[parameter]["average"] = parameter.clone()
        averages = [self.state[parameter]["average"] for parameter in parameters]
        self._update([*map(to_local, averages)], [*map(to_local, parameters)], 1)

    @torch.no_grad()
    def exchange(self) -> None:
        """Exchange the weights with their averages, if these are what is evaluated. Before the first step, do
        nothing."""
        if not self._is_evaluated:
            return
        # offloaded weights may still be on their way to the GPU
        if torch.accelerator.is_available():
            torch.accelerator.synchronize()
        for parameter, state in self.state.items():
            weights = parameter.clone()
            parameter.copy_(state["average"])
            state["average"].copy_(weights)
        # FSDP keeps what it gathered for a forward pass until a backward pass
        for unit in sharded_units(self._model):
            unit.reshard()


def with_average(config: Config, model: nn.Module, optimizers: list[Optimizer]) -> list[Optimizer]:
    """Add what averages a model's parameters, if the settings ask for that."""
    if config.ema.decay:
        optimizers.append(Average(model, config.ema.decay, config.ema.evaluate))
    return optimizers


@contextlib.contextmanager
def averaged(phase: str, run: Run | None = None) -> Iterator[None]:
    """Put the averages in place of the weights during evaluations and the export."""
    optimizers = run.optimizers if run and phase in ("evaluation", "export") else []
    averages = [optimizer for optimizer in optimizers if isinstance(optimizer, Average)]
    for average in averages:
        average.exchange()
    yield
    for average in averages:
        average.exchange()
