"""Train data-parallel by hand, for any task: what DDP does, one step at a time.

    torchrun --standalone --nproc-per-node=2 -m src.check.reference --config=FILE.yaml [--key.sub=value]...

`train.py --check` compares the run with this second implementation, which does without Accelerator, DDP, FSDP, gradient
accumulation, mixed precision and checkpoints.

Every process holds the whole model and computes the gradients of its shard of each batch. To keep the replicas equal,
weights are `broadcast` at the start, and each step does an `all_reduce` of the loss, of the number of its targets (the
divisor) and of each gradient. DDP computes the same, but faster: it reduces buckets of 25 MB while the backward pass is
still running.

Sources: https://docs.pytorch.org/tutorials/intermediate/dist_tuto.html and, for what DDP does, Li et al. 2020,
https://arxiv.org/abs/2006.15704.
"""

import sys
from collections.abc import Iterable, Iterator
from itertools import count, islice
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from accelerate.utils import send_to_device, set_seed
from torch import Tensor, nn

from src.config.config import Config, load_config
from src.distributed.accelerator import sum_dtype
from src.distributed.process import exit_codes
from src.tasks import TASKS
from src.tasks.base import Examples, Task, TaskState
from src.tasks.task_checks import require_sum
from src.training.batches import fetch_batch
from src.training.optim import build_optimizers, extended, lr_at, set_lr
from src.training.run import new_model


def own_indices(config: Config[Task], dataset: Examples, first: int, rank: int, world_size: int) -> Iterator[list[int]]:
    """Yield the indices of this process's examples in each step after step `first`, forever: every world_size-th of the
    global batch, starting at its rank; at an epoch's end there may be none. torch's DistributedSampler deals in the
    same way if `set_epoch` is called."""
    size = config.global_batch_size
    first_epoch, done = divmod(first, config.steps_per_epoch(len(dataset)))
    for epoch in count(first_epoch):
        random = np.random.default_rng([config.seed, epoch])  # the same on all processes
        order = config.task.order(dataset, random, size)
        for start in range(done * size, len(order), size):
            yield np.asarray(order[start : start + size][rank::world_size]).tolist()
        done = 0


def accumulate_gradients(task: Task, model: nn.Module, batches: Iterable[Any]) -> tuple[Tensor, Tensor]:
    """Add the gradients of this process's summed loss to those of `model`.

    Returns:
        The sum of the loss and the number of its targets, float64, shape ().

    Raises:
        UserError: Task.loss did not return a sum.
    """
    device = next(model.parameters()).device
    loss_sum, num_targets = torch.zeros(2, dtype=sum_dtype(device), device=device)
    for batch in batches:
        data = send_to_device(batch, device)
        loss = task.loss(model, data)
        require_sum(task, loss, data)
        loss.backward()
        loss_sum += loss.detach()
        num_targets += task.count(batch)["targets"]
    return loss_sum, num_targets


def average_gradients(model: nn.Module, num_targets: Tensor) -> None:
    """Turn each process's gradients into those of the mean loss over all targets of the global batch."""
    for parameter in model.parameters():
        if parameter.requires_grad:
            if parameter.grad is None:  # this process had no example left
                parameter.grad = torch.zeros_like(parameter)
            all_reduce(parameter.grad)
            parameter.grad /= num_targets.clamp(min=1).to(parameter.grad.dtype)


def all_reduce(tensor: Tensor) -> Tensor:
    """Sum `tensor` over all processes, in place, and return it."""
    if dist.is_initialized():
        dist.all_reduce(tensor)
    return tensor


def main(argv: list[str]) -> None:
    """Train, and print the loss of each step."""
    config = load_config(argv, TASKS)
    dist.init_process_group()  # NCCL for tensors on GPUs, gloo for others
    rank, world_size = dist.get_rank(), dist.get_world_size()
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", rank % torch.cuda.device_count())
    task = config.task.bind(TaskState(device.type, is_check=True))
    config = config.model_copy(update={"task": task})
    if rank > 0:
        dist.barrier()
    train_set, _ = task.build_datasets()
    if rank == 0:
        dist.barrier()
    model = new_model(config)[0].to(device)  # with the same seed on all processes
    for tensor in model.state_dict().values():
        dist.broadcast(tensor, src=0)
    optimizers = extended(config, model, build_optimizers(config.optim, model))
    set_seed((config.seed + rank) % 2**32)  # so that dropout differs between processes

    size = len(train_set)
    steps_per_epoch, schedule_steps = config.steps_per_epoch(size), config.schedule_steps(size)
    steps = own_indices(config, train_set, 0, rank, world_size)
    for step, indices in enumerate(islice(steps, config.total_steps(size))):
        epoch, done = divmod(step, steps_per_epoch)
        if done == 0:
            epoch_set = task.augmented(train_set, [config.seed, epoch, 1])
        batches = [fetch_batch(task, epoch_set, indices)] if indices else []
        loss_sum, num_targets = map(all_reduce, accumulate_gradients(task, model, batches))
        average_gradients(model, num_targets)
        if config.optim.max_grad_norm is not None:
            nn.utils.clip_grad_norm_(model.parameters(), config.optim.max_grad_norm)
        set_lr(optimizers, lr_at(step, config.optim, schedule_steps, steps_per_epoch))
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        if rank == 0:
            print(f"step {step + 1}  loss {(loss_sum / num_targets).item():.9g}", flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    with exit_codes("reference"):
        main(sys.argv[1:])
