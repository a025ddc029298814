"""The gradients that the run is about to update with, and the same by hand."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from unittest import mock

import torch
from torch import Tensor

from src.batches import MicroBatch
from src.check.errors import NOISE_FACTORS, relative_errors
from src.check.subject import Reference, Subject, whole
from src.reference import all_reduce, average_gradients, backward


@dataclass
class Taken:
    """What the run had in hand when it was about to update the weights."""

    gradients: dict[str, Tensor] = field(default_factory=dict)
    """Whole, by the parameter's name; scaled and clipped."""
    rates: list[float] = field(default_factory=list)
    """The learning rate of each parameter group."""


@contextlib.contextmanager
def taken(subject: Subject, is_withheld: bool = False) -> Iterator[Taken]:
    """What the step inside takes; nothing where it takes none, as a gradient is not finite.

    Args:
        is_withheld: keep it from the optimizers, so that they and the weights stay as they are.
    """
    found = Taken()
    optimizers = [optimizer.optimizer for optimizer in subject.optimizers]

    def take(*_: object) -> None:
        for name, parameter in subject.bare().named_parameters():
            if parameter.grad is not None:
                found.gradients[name] = whole(parameter.grad, subject.device).clone()
        found.rates = [float(group["lr"]) for optimizer in optimizers for group in optimizer.param_groups]

    with contextlib.ExitStack() as undo:
        if is_withheld:
            for optimizer in optimizers:
                undo.enter_context(
                    mock.patch.object(optimizer, "step", take if optimizer is optimizers[0] else _nothing)
                )
        else:
            undo.callback(optimizers[0].register_step_pre_hook(take).remove)
        yield found


def _nothing(*_: object) -> None: ...


@dataclass
class ByHand:
    """What the reference makes of a global batch, in fp32."""

    gradients: dict[str, Tensor]
    """Of its mean loss; not clipped."""
    loss: float
    noise: dict[str, float]
    """Relative errors that half precision may make of the gradients, by name, and of `all`; empty in fp32."""

    def clip(self, norm: float, max_norm: float) -> None:
        """Args:
        norm: of the gradients.
        """
        for gradient in self.gradients.values():
            gradient *= max_norm / (norm + 1e-6)


def by_hand(subject: Subject, reference: Reference, window: list[MicroBatch]) -> ByHand:
    """From the micro-batches of `window` that are no stand-ins, with the random numbers that a step after `seed` draws.
    Collective."""
    gradients, loss = _gradients(subject, reference, window)
    noise = {}
    if subject.is_half:
        # bf16 also for fp16, which has more digits, but would need its loss scaled
        with torch.autocast(subject.device.type, torch.bfloat16):
            rough, _ = _gradients(subject, reference, window)
        factor = NOISE_FACTORS["FSDP" if subject.accelerator.is_fsdp2 else "autocast"]
        noise = {name: factor * error for name, error in relative_errors(rough, gradients).items()}
    return ByHand(gradients, loss, noise)


def _gradients(subject: Subject, reference: Reference, window: list[MicroBatch]) -> tuple[dict[str, Tensor], float]:
    subject.seed()
    batches = [micro_batch.data for micro_batch in window if micro_batch.weight]
    loss_sum, count = map(all_reduce, backward(subject.task, reference.model, batches))
    average_gradients(reference.model, count)
    found = {name: p.grad for name, p in reference.model.named_parameters() if p.grad is not None}
    reference.model.zero_grad()
    return found, (loss_sum / count.clamp(min=1)).item()
