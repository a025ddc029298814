"""The gradients that the run is about to update with, and the same by hand."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from unittest import mock

import torch
from torch import Tensor

from src.data.loading import MicroBatch
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

    def take(*_: object) -> None:
        for name, parameter in subject.bare().named_parameters():
            if parameter.grad is not None:
                found.gradients[name] = whole(parameter.grad, subject.device).clone()
        found.rates = [float(group["lr"]) for o in subject.optimizers for group in o.param_groups]

    first, *others = subject.optimizers
    with contextlib.ExitStack() as undo:
        if is_withheld:
            undo.enter_context(mock.patch.object(first, "step", take))
            for optimizer in others:
                undo.enter_context(mock.patch.object(optimizer, "step"))
        else:
            undo.callback(first.register_step_pre_hook(take).remove)
        yield found


@dataclass
class ByHand:
    """What the reference makes of a global batch."""

    gradients: dict[str, Tensor]
    """Of its mean loss; not clipped."""
    loss: float
    noise: dict[str, float]
    """Relative errors that half precision makes of the gradients, by name, and of `all`; empty in fp32."""
    noise_factor: float = 1.0
    """How many times that the run may err."""

    def clip(self, norm: float, max_norm: float) -> None:
        """Args:
        norm: of the gradients.
        """
        for gradient in self.gradients.values():
            gradient *= max_norm / (norm + 1e-6)


def by_hand(subject: Subject, reference: Reference, window: list[MicroBatch]) -> ByHand:
    """From this process's micro-batches, with the random numbers that a step after `seed` draws. Collective.

    In fp32, but under autocast where the run does the same to the same operators.
    """
    gradients, loss = _gradients(subject, reference, window)
    if not subject.is_half:
        return ByHand(gradients, loss, {})
    with reference.autocast(torch.bfloat16):  # for fp16, too, which would need its loss scaled
        rough, rough_loss = _gradients(subject, reference, window)
    noise = relative_errors(rough, gradients)
    if subject.autocasts_to_bf16:
        return ByHand(rough, rough_loss, noise, NOISE_FACTORS["same"])
    return ByHand(gradients, loss, noise, NOISE_FACTORS["FSDP" if subject.accelerator.is_fsdp2 else "other"])


def _gradients(subject: Subject, reference: Reference, window: list[MicroBatch]) -> tuple[dict[str, Tensor], float]:
    subject.seed()
    loss_sum, count = backward(subject.task, reference.model, [batch.data for batch in window if batch.weight])
    for batch in window:  # a model may have collectives of its own (SyncBatchNorm): as many forward passes everywhere
        if not batch.weight:
            (subject.task.loss(reference.model, batch.to(subject.device))[0] * 0).backward()
    loss_sum, count = all_reduce(loss_sum), all_reduce(count)
    average_gradients(reference.model, count)
    found = {name: p.grad for name, p in reference.model.named_parameters() if p.grad is not None}
    reference.model.zero_grad()
    return found, (loss_sum / count.clamp(min=1)).item()
