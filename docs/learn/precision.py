"""Rounding, and a mean that doesn't depend on how a batch is split: the exact way, and the classic wrong ones."""

import course  # prints that the processes start and, in a line, which assertion fails
import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.functional import cross_entropy

torch.set_num_threads(1)
dist.init_process_group("gloo")
rank, p = dist.get_rank(), dist.get_world_size()
images, labels = torch.tensor(load_digits().data).float() / 16, torch.tensor(load_digits().target)
STEPS, SCALE, MAX_NORM = 40, 1024.0, 0.5
SIZES = [2, 10, 20, 32]  # of the micro-batches, 64 targets in all: rank 0 has the first two, rank 1 the others
RIGHT = ("the whole batch at once", "sum / global count")
WRONG = ("mean of micro-batch means", "mean of processes' means", "sum of micro-batch means", "micro batches clipped",
         "clipped, then unscaled", "scheduler stepped p times", "weights in bf16")  # fmt: skip


def add_up(dtype: torch.dtype) -> float:
    """Return a weight of 1 after 1,000 updates of 0.001."""
    weight = torch.ones((), dtype=dtype)
    for _ in range(1000):
        weight += 0.001  # the sum is rounded to the nearest number of this dtype
    return weight.item()


def gradient(dtype: torch.dtype, scale: float) -> float:
    """Return the gradient of 1e-4 * 1e-4 * x, by a backward pass in this dtype with this loss scale."""
    x = torch.ones((), dtype=dtype, requires_grad=True)
    (found,) = torch.autograd.grad(x * 1e-4 * 1e-4 * scale, x)  # last factor first: scale
    return found.item() / scale


def train(way: str) -> float:
    """Return the final loss over all digits."""
    torch.manual_seed(0)  # the same weights on both processes
    model = nn.Sequential(nn.Linear(64, 32), nn.GELU(), nn.Linear(32, 10))
    weights = list(model.parameters())
    schedule = torch.optim.lr_scheduler.LinearLR(sgd := torch.optim.SGD(weights, lr=0.5), 1, 0, total_iters=STEPS)
    for step in range(STEPS):
        batch = torch.arange(64 * step, 64 * step + 64) % len(images)
        micro_batches = batch.split(SIZES)[2 * rank : 2 * rank + 2] if way != RIGHT[0] else [batch]
        own = sum(map(len, micro_batches))
        dist.all_reduce(count := torch.tensor(own))  # the targets of all processes, before the first backward pass
        for micro_batch in micro_batches:
            loss_sum = cross_entropy(model(images[micro_batch]), labels[micro_batch], reduction="sum")
            wrong = {WRONG[0]: 2 * len(micro_batch), WRONG[1]: own, WRONG[2]: len(micro_batch)}
            (loss_sum * SCALE / wrong.get(way, count / p)).backward()  # / p: the gradients are averaged below
            if way == "micro batches clipped":
                nn.utils.clip_grad_norm_(weights, MAX_NORM * SCALE)
        gradients = [w.grad for w in weights if w.grad is not None]
        for g in gradients:
            dist.all_reduce(g)
            g /= p if way == "clipped, then unscaled" else p * SCALE
        nn.utils.clip_grad_norm_(weights, MAX_NORM)
        for g in gradients:
            g /= SCALE if way == "clipped, then unscaled" else 1
        sgd.step()
        sgd.zero_grad()
        for w in weights if way == "weights in bf16" else ():
            w.data.copy_(w.bfloat16())
        for _ in range(p if way == "scheduler stepped p times" else 1):
            schedule.step()
    return cross_entropy(model(images), labels).item()


sums = [add_up(dtype) for dtype in (torch.float32, torch.float16, torch.bfloat16)]
small = [gradient(torch.float16, 1), gradient(torch.float16, 2**15), gradient(torch.bfloat16, 1)]
losses = {way: train(way) for way in RIGHT + WRONG}
off = {way: abs(loss - losses[RIGHT[0]]) for way, loss in losses.items()}
if rank == 0:
    print("1 + 1,000 x 0.001:   fp32 {:.4f}   fp16 {:.4f}   bf16 {:.4f}".format(*sums))
    print("a gradient of 1e-08: fp16 {:.2g}   fp16 with loss scale 32768 {:.2g}   bf16 {:.2g}\n".format(*small))
    print(*(f"{way:28} loss {losses[way]:.3f}   off by {off[way]:6.3f}" for way in losses), sep="\n")
assert (sums[2], small[0]) == (1, 0)
assert off[RIGHT[1]] < 1e-5, f"{RIGHT[1]}: off by {off[RIGHT[1]]:.3f}"
assert not (harmless := [way for way in WRONG if off[way] < 1e-3]), f"{harmless[0]} does no harm"
dist.barrier()
dist.destroy_process_group()
