"""From gradients to an update: their norm over all processes, scaling and clipping, steps that are left out."""

import math
from collections.abc import Iterable

import torch
from accelerate import Accelerator
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from src.distributed.accelerator import num_replicas


def float64_zeros(shape: int | tuple[int, ...], device: torch.device) -> Tensor:
    """Return zeros to sum in: float64, or float32 on MPS, which has no float64."""
    return torch.zeros(shape, dtype=torch.float32 if device.type == "mps" else torch.float64, device=device)


def local_gradients(parameters: Iterable[nn.Parameter]) -> list[Tensor]:
    """Return this process's shards of the gradients, or whole gradients if they are not sharded."""
    return [to_local(p.grad) for p in parameters if p.grad is not None]


def grad_norm(accelerator: Accelerator, gradients: list[Tensor]) -> Tensor:
    """Return the L2 norm of the gradients of all processes; shape (), float64 (on MPS float32), on the run's device,
    for which this doesn't wait. Collective if they are sharded: else each process has all of them.

    Args:
        gradients: this process's.
    """
    squares = grad_square_sum(gradients).to(accelerator.device)
    if accelerator.is_fsdp2:
        squares = accelerator.reduce(squares, "sum") / num_replicas(accelerator)
    return squares.sqrt()


def grad_square_sum(gradients: list[Tensor]) -> Tensor:
    """Return the sum of the squares of all values; shape (), float64 (on MPS float32)."""
    device = gradients[0].device
    if device.type == "cpu":  # torch's norm of a million values is off by 5e-5 there, but its sum adds in pairs
        return torch.stack([gradient.square().sum() for gradient in gradients]).double().sum()
    dtype = torch.float32 if device.type == "mps" else torch.float64
    return torch.stack(torch._foreach_norm(gradients, 2, dtype=dtype)).square().sum()


def scale_and_clip_(gradients: list[Tensor], scale: float | Tensor, norm: Tensor, max_norm: float | None) -> None:
    """Multiply the gradients by `scale`, in place, and clip them to a global L2 norm of `max_norm` if one is given.

    Args:
        gradients: this process's part of them.
        scale: a number, or a tensor of shape ().
        norm: L2, of all gradients over all processes, after scaling; shape (), on any device.
    """
    if max_norm is not None:
        scale = (max_norm / (norm + 1e-6)).clamp(max=1.0) * scale
    if isinstance(scale, Tensor):
        torch._foreach_mul_(gradients, scale.to(gradients[0]))
    elif scale != 1:
        torch._foreach_mul_(gradients, scale)


def step_if_finite(optimizers: Iterable[Optimizer], norm: Tensor) -> None:
    """Take the step, unless the gradients' norm, of shape (), is not finite: on a GPU where an optimizer is fused and
    can leave it out by itself, else by waiting for the answer. Then clear the gradients."""
    for optimizer in optimizers:
        # torch's fused SGD reads momentum that its first step should have written, even if that was left out
        needs_first_step = optimizer.defaults.get("momentum") and not optimizer.state
        if optimizer.defaults.get("fused") and not norm.is_cpu and not needs_first_step:
            # as torch.amp.GradScaler does it; the optimizer would copy it to offloaded parameters without waiting
            device = optimizer.param_groups[0]["params"][0].device
            optimizer.found_inf = (~norm.isfinite()).float().to(device)  # type: ignore[attr-defined]
            optimizer.step()
        elif optimizer.param_groups[0].get("capturable") and optimizer.state:
            _step_or_undo(optimizer, norm.isfinite())
        elif math.isfinite(norm):
            optimizer.step()
        optimizer.zero_grad()


def _step_or_undo(optimizer: Optimizer, is_finite: Tensor) -> None:
    """Take the step, and undo it on the device unless `is_finite`, of shape (): a graph cannot wait for the answer."""
    changed = [p.detach() for group in optimizer.param_groups for p in group["params"]]
    changed += [value for state in optimizer.state.values() for value in state.values()]
    before = torch._foreach_clone(changed)
    optimizer.step()
    for after, was in zip(changed, before, strict=True):
        torch.where(is_finite, after, was, out=after)


def to_local(tensor: Tensor) -> Tensor:
    """Return this process's shard, or the whole tensor if it is not sharded."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
