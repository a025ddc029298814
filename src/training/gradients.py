"""From gradients to an update: their norm over all processes, scaling and clipping, and skipped steps."""

import math
from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext

import torch
from accelerate import Accelerator
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from src.distributed.accelerator import num_replicas
from src.training.run import Run


def float64_zeros(shape: int | tuple[int, ...], device: torch.device) -> Tensor:
    """Return zeros to add losses and counts to: float64, or float32 on MPS, which has no float64."""
    # the order of adding differs with the number of processes; in float64 that is far below the rounding of a loss
    dtype = torch.float32 if device.type == "mps" else torch.float64
    return torch.zeros(shape, dtype=dtype, device=device)


def reducing(run: Run, is_last: bool) -> AbstractContextManager[None]:
    """Return the context for a micro-batch's forward and backward pass, which decides whether gradients are reduced at
    its end or only added up on this process."""
    # DDP reduces them once, after the last micro-batch. FSDP would have to keep whole gradients in fp32 on each process
    # until then, which fsdp_reduce_each_micro_batch=false accepts for fewer exchanges.
    reduces_each = run.accelerator.is_fsdp2 and run.config.fsdp_reduce_each_micro_batch
    if is_last or reduces_each:
        return nullcontext()
    return run.accelerator.no_sync(run.model)


def local_gradients(parameters: Iterable[nn.Parameter]) -> list[Tensor]:
    """Return this process's shards of the gradients, or whole gradients if they are not sharded."""
    return [to_local(p.grad) for p in parameters if p.grad is not None]


def grad_norm(accelerator: Accelerator, gradients: list[Tensor]) -> Tensor:
    """Return the L2 norm of the gradients of all processes, without waiting for the device.

    Collective if they are sharded: else each process has all of them.

    Args:
        gradients: this process's.

    Returns:
        Shape (), float64 (on MPS float32), on the run's device.
    """
    # not clip_grad_norm_: under FSDP2 it returns a DTensor, which every process would have to gather before reading it
    squares = grad_square_sum(gradients).to(accelerator.device)
    if accelerator.is_fsdp2:
        # squares add up over shards, norms don't: one all-reduce of 8 bytes
        squares = accelerator.reduce(squares, "sum")
        # under HSDP each shard is on several processes, and was counted as often
        squares = squares / num_replicas(accelerator)
    return squares.sqrt()


def grad_square_sum(gradients: list[Tensor]) -> Tensor:
    """Return the sum of the squares of all values; shape (), float64 (on MPS float32)."""
    device = gradients[0].device
    if device.type == "cpu":
        # torch's norm of a million values is off by 5e-5 there, but its sum adds in pairs
        squares = [gradient.square().sum() for gradient in gradients]
        return torch.stack(squares).double().sum()
    dtype = torch.float32 if device.type == "mps" else torch.float64
    # one kernel for all of them, where a norm each would launch as many as there are parameters
    norms = torch._foreach_norm(gradients, 2, dtype=dtype)
    return torch.stack(norms).square().sum()


def scale_and_clip_(
    gradients: list[Tensor],
    scale: float,
    norm: Tensor,
    max_norm: float | None,
) -> None:
    """Multiply the gradients by `scale`, in place, and clip them to a global L2 norm of `max_norm` if one is given.

    Args:
        gradients: this process's part of them.
        norm: L2, of all gradients over all processes, after scaling; shape (), on any device.
    """
    # unscaling and clipping are one factor, so that the gradients are read and written once
    if max_norm is not None:
        # 1e-6, as in torch's clip_grad_norm_; at most 1, so that small gradients stay as they are
        clip = (max_norm / (norm + 1e-6)).clamp(max=1.0)
        torch._foreach_mul_(gradients, (clip * scale).to(gradients[0]))
    elif scale != 1:
        torch._foreach_mul_(gradients, scale)


def step_if_finite(optimizers: Iterable[Optimizer], norm: Tensor) -> None:
    """Take the step, unless the gradients' norm, of shape (), is not finite. Then clear the gradients.

    On a GPU a fused optimizer skips the step by itself; for others the host waits for the answer.
    """
    # A NaN in one process's loss is in the norm of all, as gradients are reduced before it: they skip together, and
    # nobody has to ask.
    for optimizer in optimizers:
        # torch's fused SGD reads momentum that its first step should have written, even if that was skipped: weights
        # of 1e28 (docs/figures.md)
        needs_first_step = optimizer.defaults.get("momentum") and not optimizer.state
        # on a CPU asking costs 0.3 µs, and found_inf 28 µs
        is_fused = optimizer.defaults.get("fused") and not norm.is_cpu and not needs_first_step
        is_recorded = optimizer.param_groups[0].get("capturable") and optimizer.state
        if is_fused:
            # As torch.amp.GradScaler does it: the kernel reads found_inf on the device, and leaves weights and averages
            # as they are. Offloaded parameters are on the CPU; the optimizer itself would copy it there without
            # waiting, and might read it before it has arrived.
            device = optimizer.param_groups[0]["params"][0].device
            optimizer.found_inf = (~norm.isfinite()).float().to(device)  # type: ignore[attr-defined]
            optimizer.step()
        elif is_recorded:
            _step_or_undo(optimizer, norm.isfinite())
        elif math.isfinite(norm):
            optimizer.step()
        # also after a skipped step: the next one would add its gradients to the NaN
        optimizer.zero_grad()


def _step_or_undo(optimizer: Optimizer, is_finite: Tensor) -> None:
    """Take the step, and undo it on the device unless `is_finite`, of shape (): a graph cannot wait for the answer."""
    # a copy of weights and state, which only the small models that graphs are for can afford
    changed = [p.detach() for group in optimizer.param_groups for p in group["params"]]
    changed += [value for state in optimizer.state.values() for value in state.values()]
    before = [tensor.clone() for tensor in changed]
    optimizer.step()
    # selected, not multiplied by 0: NaN times 0 is NaN
    for after, was in zip(changed, before, strict=True):
        torch.where(is_finite, after, was, out=after)


def to_local(tensor: Tensor) -> Tensor:
    """Return this process's shard, or the whole tensor if it is not sharded."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
