"""Fully sharded data parallelism (ZeRO-3) by hand, next to FSDP2; both also with offload."""

import course  # prints that the processes start and, in a line, which assertion fails
import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.distributed import fsdp, tensor
from torch.nn.functional import mse_loss, pad

dist.init_process_group("gloo")
all_gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)  # its name before torch 2.14
reduce_scatter = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)  # likewise
rank, p, mesh = dist.get_rank(), dist.get_world_size(), dist.init_device_mesh("cpu", (dist.get_world_size(),))
digits = torch.tensor(load_digits().images).flatten(1).float()[rank::p] / 16  # this rank's images, 64 pixels each


def shard(block: nn.Module, is_offloaded: bool) -> nn.Parameter:
    """Return this rank's shard of the block's parameters; from now on, all are in memory only while it computes."""
    weights = list(block.parameters())
    flat = nn.utils.parameters_to_vector(weights).detach()
    full = pad(flat, (0, -len(flat) % p))  # zero-pad so that all shards have the same length
    own = nn.Parameter(full.chunk(p)[rank].clone())  # what the optimizer updates
    nn.utils.vector_to_parameters(full, weights)  # the weights are now views of `full`,
    full.untyped_storage().resize_(0)  # which has no memory until the block computes

    def gather(*_: object) -> None:  # before forward, and again before backward
        full.untyped_storage().resize_(full.nbytes)  # allocated, but uninitialized
        all_gather(full, own.detach().to("cpu", copy=is_offloaded))  # if offloaded, host to device first

    def free(*_: object) -> None:  # after forward: the weights that autograd saved are views of `full` too
        full.untyped_storage().resize_(0)

    def reduce(_: Tensor) -> None:  # each time backward has finished a weight's gradient
        gradients = [w.grad for w in weights if w.grad is not None]
        if len(gradients) == len(weights):  # this was the block's last one
            part = torch.empty_like(own)  # of the sum over the ranks
            reduce_scatter(part, pad(nn.utils.parameters_to_vector(gradients), (0, -len(flat) % p)))
            own.grad = (part / p).to("cpu", copy=is_offloaded)  # the mean; if offloaded, device to host
            block.zero_grad()
            free()

    block.register_forward_pre_hook(gather)
    block.register_forward_hook(free)
    block.register_full_backward_pre_hook(gather)
    for w in weights:
        w.register_post_accumulate_grad_hook(reduce)
    return own


class CountSent(torch.utils._python_dispatch.TorchDispatchMode):  # sees every operator, whoever calls it
    def __torch_dispatch__(self, op, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        count["sent"] += max(args[0].nbytes, args[1].nbytes) * (p - 1) // p if op.namespace == "c10d" else 0
        count["moved"] += args[0].nbytes if op.name() == "aten::_to_copy" else 0
        return op(*args, **(kwargs or {}))


for kind in ("FSDP2", "by hand", "FSDP2, offloaded", "by hand, offloaded"):
    torch.manual_seed(0)  # the same weights on all processes
    model = nn.Sequential(*(nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)) for _ in range(4)))
    policy = fsdp.CPUOffloadPolicy(pin_memory=False) if "offloaded" in kind else fsdp.OffloadPolicy()
    for module in (*model, model) if "FSDP2" in kind else ():
        fsdp.fully_shard(module, mesh=mesh, offload_policy=policy)
    trained = list(model.parameters()) if "FSDP2" in kind else [shard(block, "offloaded" in kind) for block in model]
    adam, losses = torch.optim.Adam(trained, lr=0.002), torch.zeros(20)
    for step, own in enumerate(digits.split(64 // p)[:20]):
        count = {"held": 0, "sent": 0, "moved": 0}  # bytes, on this rank
        with CountSent():
            (loss := mse_loss(model(own), own)).backward()  # it learns to reproduce its input
        losses[step] = loss.detach() / p
        adam.step()
        kept: list = [t for w in trained for t in (w, w.grad, adam.state[w]["exp_avg"], adam.state[w]["exp_avg_sq"])]
        count["held"] = sum((t.to_local() if isinstance(t, tensor.DTensor) else t).nbytes for t in kept)
        adam.zero_grad()
    dist.all_reduce(losses)  # the mean over the processes
    if rank == 0:
        print(f"{kind:20} loss {losses[-1]:.4f}, bytes:", *(f"{n:9,} {what}" for what, n in count.items()))
    if kind == "FSDP2":
        expected, size = losses, (count["held"], count["sent"])
    assert torch.allclose(losses, expected, rtol=0, atol=1e-5), f"off by {(losses - expected).abs().max():.4f}"
    assert (count["held"], count["sent"]) == size, f"{count} instead of {size}"
dist.barrier()
dist.destroy_process_group()
