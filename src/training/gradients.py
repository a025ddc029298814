"""Turn gradients into an update: their norm over all processes, scaling, clipping, and skipping non-finite steps."""

import math
from contextlib import AbstractContextManager, nullcontext

import torch
from accelerate import Accelerator
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from src.distributed.accelerator import num_replicas, sum_dtype
from src.training.run import Run

PIECE = 2**15
"""Values whose norm torch takes at once on a CPU."""


def gradient_sync(run: Run, is_last: bool) -> AbstractContextManager[None]:
    """Return the context for a micro-batch's forward and backward pass: gradients are all-reduced at its end, or only
    accumulated on this process."""
    # DDP reduces once, after the last micro-batch. Under FSDP that means holding full fp32 gradients on each rank until
    # then, which fsdp_reduce_each_micro_batch=false accepts for fewer collectives.
    reduces_each = run.accelerator.is_fsdp2 and run.config.fsdp_reduce_each_micro_batch
    if is_last or reduces_each:
        return nullcontext()
    return run.accelerator.no_sync(run.model)


@torch.no_grad()  # else autograd would record each `to_local`
def local_gradients(parameters: list[nn.Parameter]) -> list[Tensor]:
    """Return this process's shards of the gradients; whole gradients if they are not sharded."""
    return [to_local(p.grad) for p in parameters if p.grad is not None]


def grad_norm(accelerator: Accelerator, gradients: list[Tensor], scale: float) -> Tensor:
    """Return `scale` times the L2 norm of the gradients over all processes, without waiting for the device; shape (),
    float64 (on MPS float32), on the run's device. `gradients` are this process's. Collective if they are sharded."""
    # not clip_grad_norm_: under FSDP2 it returns a DTensor, which has to be gathered before it can be read
    norm = local_norm(gradients).to(accelerator.device)
    if accelerator.is_fsdp2:
        # squares add up over shards, norms don't: one all-reduce of 8 bytes
        squares = accelerator.reduce(norm.square(), "sum")
        # under HSDP each shard is on several processes, and was counted that many times
        norm = (squares / num_replicas(accelerator)).sqrt()
    return norm if scale == 1 else norm * scale


def local_norm(gradients: list[Tensor]) -> Tensor:
    """Return the L2 norm of these gradients; shape (), float64 (on MPS float32)."""
    device = gradients[0].device
    dtype = sum_dtype(device)
    if device.type == "cpu":
        # Of 28 million values, torch's norm in fp32 is off by 1.6e-3, and in float64 takes 25 times as long. Of pieces
        # it is nearly as fast, and off by 7e-8, less than fp32's rounding of one value.
        pieces = [piece for g in gradients for piece in (g.flatten().split(PIECE) if g.numel() > PIECE else (g,))]
        norms = torch._foreach_norm(pieces)
    else:
        # one kernel for all of them; separate norms would launch one per parameter
        norms = torch._foreach_norm(gradients, dtype=dtype)
    return torch.linalg.vector_norm(torch.stack(norms), dtype=dtype)


def scale_and_clip_(gradients: list[Tensor], scale: float, norm: Tensor, max_norm: float | None) -> None:
    """Multiply the gradients by `scale`, in place, and clip them to a global L2 norm of `max_norm` if one is given.

    Args:
        gradients: this process's shards.
        norm: the L2 norm of all gradients over all processes, after scaling; shape (), on any device.
    """
    # scale and clip by one factor, to read and write the gradients only once
    if max_norm is not None:
        # 1e-6 as in torch's clip_grad_norm_; at most 1, to leave small gradients alone
        clip = (max_norm / (norm + 1e-6)).clamp(max=1.0)
        torch._foreach_mul_(gradients, (clip * scale).to(gradients[0]))
    elif scale != 1:
        torch._foreach_mul_(gradients, scale)


def step_if_finite(optimizers: list[Optimizer], norm: Tensor) -> None:
    """Take the step unless the gradients' norm, of shape (), is non-finite. Then clear the gradients.

    On NVIDIA's and AMD's GPUs a fused optimizer skips the step by itself; for others the host waits for the norm.
    """
    # Gradients are reduced before the norm is taken, so a NaN in one process's loss is in the norm of all: they skip
    # together, without another collective.
    for optimizer in optimizers:
        # torch's fused SGD reads momentum that its first step should have written, even if it skipped that step, and
        # weights of 1e28 come out
        needs_first_step = optimizer.defaults.get("momentum") and not optimizer.state
        # on a CPU reading the norm costs 0.3 µs, and found_inf 28 µs; on MPS, torch's kernel ignores found_inf
        is_fused = optimizer.defaults.get("fused") and norm.is_cuda and not needs_first_step
        if is_fused:
            # As torch.amp.GradScaler does: the kernel reads found_inf on the device, and leaves weights and averages
            # alone. Offloaded parameters are on the CPU: the optimizer itself would copy found_inf there without
            # waiting, and might read it before it arrives.
            device = optimizer.param_groups[0]["params"][0].device
            # NaN - NaN and inf - inf are NaN, which is not 0: half the kernels of isfinite
            optimizer.found_inf = (norm - norm != 0).float().to(device)  # type: ignore[attr-defined]
            optimizer.step()
        elif math.isfinite(norm):
            optimizer.step()
        # after a skipped step too: the next one would add its gradients to the NaN
        optimizer.zero_grad()


def to_local(tensor: Tensor) -> Tensor:
    """Return this process's shard, or the whole tensor if it is not sharded."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
