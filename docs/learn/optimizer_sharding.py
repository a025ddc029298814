"""Optimizer-state sharding by hand (ZeRO stage 1), with the curve of one process; then with torch's instead.

torchrun --standalone --nproc-per-node=4 docs/learn/optimizer_sharding.py
"""

import course  # prints that the processes start and, in a line, which assertion fails
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor.debug import CommDebugMode
from torch.nn.functional import cross_entropy
from torch.optim import Adam

inputs, labels = torch.tensor(load_digits().data / 16, dtype=torch.float32), torch.tensor(load_digits().target)
dist.init_process_group("gloo")
rank, p = dist.get_rank(), dist.get_world_size()


class ShardedOptimizer:
    """An optimizer sharded over the processes: each keeps the state of its own parameters, and updates only these."""

    def __init__(self, parameters: Iterable[Tensor], optimizer_class: type[Adam], lr: float) -> None:
        self.parts: list[list[Any]] = [[] for _ in range(p)]
        for parameter in sorted(parameters, key=Tensor.numel, reverse=True):  # largest first,
            smallest = min(self.parts, key=lambda part: sum(map(Tensor.numel, part)))
            smallest.append(parameter)  # to the process that has the least so far
        self.optim = optimizer_class(self.parts[rank], lr=lr)

    def step(self) -> None:
        for owner, part in enumerate(self.parts):
            for parameter in part:
                dist.reduce(parameter.grad, dst=owner)  # the sum over all ranks, to the one that needs it
        self.optim.step()
        for owner, part in enumerate(self.parts):
            for parameter in part:
                dist.broadcast(parameter.data, src=owner)  # its new weights, to all ranks


def train(name: str, sharded: Any, own: slice) -> Tensor:
    """Return each step's loss over the whole batch, of which this process reads only its own examples."""
    torch.manual_seed(0)  # the same weights on all processes
    hidden = [layer for _ in range(4) for layer in (nn.Linear(128, 128), nn.GELU())]
    model = nn.Sequential(nn.Linear(64, 128), nn.GELU(), *hidden, nn.Linear(128, 10))
    parameters: list[Any] = list(model.parameters())
    optimizer: Any = sharded(parameters, Adam, lr=0.002) if sharded else Adam(parameters, lr=0.002)
    losses = []
    for batch in torch.arange(len(labels)).split(64)[:20]:
        with CommDebugMode() as comm:
            loss = cross_entropy(model(inputs[batch[own]]), labels[batch[own]], reduction="sum") / len(batch)
            model.zero_grad()
            loss.backward()
            for parameter in parameters if sharded is ZeroRedundancyOptimizer else []:
                dist.all_reduce(parameter.grad)  # torch's leaves the gradients to DDP: the sum, to all
            optimizer.step()
        losses.append(loss.detach())
    adam, curve, states = (optimizer.optim if sharded else optimizer).state, torch.stack(losses), [0] * p
    dist.all_gather_object(states, sum(x.nbytes for state in adam.values() for x in state.values() if x.dim()))
    weights = sum(x.nbytes for x in parameters)  # the gradients have the same size
    if sharded:
        dist.all_reduce(curve)
        assert sum(states) == 2 * weights, f"{name}: not two averages for each number: {states}"
    if rank == 0:
        sent = " + ".join(f"{n} {str(op).removeprefix('c10d.').strip('_')}" for op, n in comm.get_comm_counts().items())
        print(f"{name:25}{curve[0]:.4f} {curve[-1]:.4f}  {sent or '-':30}{weights:,} ", *(f"{n:,}" for n in states))
    return curve


if rank == 0:
    print(f"{'':25}first, last    sent in each step             weights  Adam's state on each, in bytes")
alone = train("one process", None, slice(None))
for name, sharded in {"by hand": ShardedOptimizer, "ZeroRedundancyOptimizer": ZeroRedundancyOptimizer}.items():
    curve = train(name, sharded, slice(rank, None, p))
    step = int(((curve - alone).abs() > 1e-5).int().argmax())  # the first that differs, if any
    assert abs(curve[step] - alone[step]) <= 1e-5, f"{name}, step {step + 1}: {curve[step]:.4f}, not {alone[step]:.4f}"
dist.barrier()
dist.destroy_process_group()
