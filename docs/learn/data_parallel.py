"""Data parallelism by hand, with the curve of one process; then with DDP instead.

torchrun --standalone --nproc-per-node=4 docs/learn/data_parallel.py
"""

import course  # prints that the processes start and, in a line, which assertion fails
import time
from collections.abc import Iterator

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DistributedSampler, TensorDataset

BATCH = 64  # of 1,797 digits: the 29th batch of an epoch has 5 left, 2 for rank 0 and 1 for each of the others
inputs, labels = torch.tensor(load_digits().data / 16, dtype=torch.float32), torch.tensor(load_digits().target)
dist.init_process_group("gloo")
events: list[str] = []  # in one step; "g": a gradient is ready, "R": an all-reduce starts


class Sampler(DistributedSampler[tuple[Tensor, int]]):
    # torch's splits an epoch, and repeats some examples so that all ranks have equally many; this one splits each batch
    def __iter__(self) -> Iterator[tuple[Tensor, int]]:
        order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(self.epoch))  # same on all ranks
        return ((batch[self.rank :: self.num_replicas], len(batch)) for batch in order.split(BATCH))


def average_bucket(group: dist.ProcessGroup, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
    events.append("R")
    return allreduce_hook(group, bucket)  # what DDP does by default: starts it, and doesn't wait


def train(name: str, rank: int, p: int) -> Tensor:
    """Return the loss of each step, over the examples of all processes."""
    torch.manual_seed(rank)  # different weights on each rank
    model: nn.Module = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 256), nn.GELU(), nn.Linear(256, 10))
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(lambda _: events.append("g"))
        if name == "by hand":
            dist.broadcast(parameter.data, src=0)  # every rank gets the weights of rank 0
    if name == "DDP":  # broadcasts the weights too; its buckets hold 25 MB by default, too much to see several here
        model = DistributedDataParallel(model, bucket_cap_mb=0.008)
        model.register_comm_hook(dist.group.WORLD, average_bucket)
    optimizer, sampler = torch.optim.SGD(model.parameters(), lr=0.5), Sampler(TensorDataset(inputs, labels), p, rank)
    losses, ends, start = [], [], time.perf_counter()
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for own, count in sampler:
            events.clear()
            # averaged over the processes, this is the mean over the whole batch
            loss = cross_entropy(model(inputs[own]), labels[own], reduction="sum") / count * p
            optimizer.zero_grad()
            loss.backward()
            gradients = [x.grad for x in model.parameters() if x.grad is not None]
            for gradient in gradients if name == "by hand" else []:  # DDP has already done it, during backward()
                events.append("R")
                dist.all_reduce(gradient)  # every rank gets the sum over all of them
                gradient /= p
            optimizer.step()
            losses.append(loss.detach())
        ends.append(own.tolist())
    assert ends[0] != ends[1], f"{name}: epoch 2 has the order of epoch 1"
    ms, curve = 1000 * (time.perf_counter() - start) / len(losses), torch.stack(losses)
    dist.all_reduce(curve)
    curve /= dist.get_world_size()
    if dist.get_rank() == 0:
        print(f"{name:13}{'  '.join(f'{curve[i - 1]:.4f}' for i in (1, 29, 30, 58))}  {''.join(events):14}{ms:.1f} ms")
    return curve


alone = train("one process", 0, 1)
for name in ("by hand", "DDP"):
    curve = train(name, dist.get_rank(), dist.get_world_size())
    step = int(((curve - alone).abs() > 1e-5).int().argmax())  # the first that differs, if any
    assert abs(curve[step] - alone[step]) <= 1e-5, f"{name}, step {step + 1}: {curve[step]:.4f}, not {alone[step]:.4f}"
dist.barrier()
dist.destroy_process_group()
