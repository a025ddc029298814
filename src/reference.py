"""Data-parallel training by hand, as the classic tutorials teach it: what DDP does, one step at a time.

    torchrun --standalone --nproc-per-node=2 -m src.reference --config=configs/mnist.yaml [--key.sub=value]...

Read it before train.py. It is also the second implementation that `train.py --check` holds the first against: there is
no Accelerator in it, no DDP and no FSDP, no accumulation, mixed precision or checkpoints.

Every process has the whole model and computes the gradients of its share of each batch. A few collectives, which every
process has to call, in the same order, keep them one model:

- `barrier`, twice: no process goes on before all have come there. The first one downloads the data for the others; and
  at the end none leaves while another still needs it.
- `broadcast`, once: process 0 sends its weights to the others. The seed made them the same already; this makes sure.
- `all_reduce` of two numbers, each step: afterwards every process has their sums over all of them. One is the loss, to
  print it. The other is what it counts, the examples (tokens, …) of the whole batch, which it is divided by: a mean of
  each process's mean would weigh wrongly where their shares differ, as they do at the end of an epoch.
- `all_reduce` of each gradient, each step, after the backward pass: their sum over the processes, divided by that
  count, is the gradient of the whole batch. All processes then take the same step, and their weights stay the same.

DDP computes the same, but faster. Each all_reduce has a latency that doesn't depend on its size, so DDP copies the
gradients into buckets of 25 MB and reduces a bucket at once: one all_reduce takes a third of the time of eight small
ones. And the last layer's gradients are ready long before the first one's: DDP starts on each bucket while the
backward pass goes on, so that most of the communication costs no time at all. `python -m benchmarks.data_parallel`
measures both against this file. FSDP goes on from there: an all_reduce is a reduce_scatter (each process gets the sum
of one part) and an all_gather (the parts come together again), and between the two a process needs only its own part.

Sources: https://docs.pytorch.org/tutorials/intermediate/dist_tuto.html, and Li et al. 2020 for what DDP does,
https://arxiv.org/abs/2006.15704.
"""

import sys
import time
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from accelerate.utils import send_to_device, set_seed
from torch import Tensor, nn

from src.config import Config, load_config
from src.data.loading import fetch
from src.distributed import float64_tensor
from src.optim import build_optimizers, lr_at, set_lr
from src.process import exit_codes
from src.tasks.base import Examples, Task


class DistributedSampler:
    """One process's share of each global batch: every world_size-th example, from its own rank on."""

    def __init__(self, config: Config, dataset: Examples, rank: int, world_size: int) -> None:
        self._config, self._dataset, self._rank, self._world_size = config, dataset, rank, world_size
        self._epoch = 0

    def set_epoch(self, epoch: int) -> None:
        """Each epoch has another order. Without this call all of them have the first one's."""
        self._epoch = epoch

    def __iter__(self) -> Iterator[np.ndarray]:
        """Indices into the dataset, int64, an array for each step of the epoch; at its end some can be empty."""
        config = self._config
        random = np.random.default_rng([config.seed, self._epoch])  # the same on all processes
        order = config.task.order(self._dataset, random, config.global_batch_size)
        for start in range(0, len(order), config.global_batch_size):
            yield order[start : start + config.global_batch_size][self._rank :: self._world_size]


def backward(task: Task, model: nn.Module, batches: Iterable[Any]) -> tuple[Tensor, Tensor]:
    """Adds to the gradients of `model` those of the summed loss of this process's batches.

    Returns:
        The loss's sum and what it counts, float64, shape ().
    """
    device = next(model.parameters()).device
    sums = float64_tensor([0.0, 0.0], device)
    for batch in batches:
        loss, count = task.loss(model, send_to_device(batch, device))
        loss.backward()
        sums += torch.stack([loss.detach().to(sums), torch.as_tensor(count, device=device).to(sums)])
    return sums[0], sums[1]


def average_gradients(model: nn.Module, count: Tensor) -> None:
    """From each process's gradients to those of the mean loss of the whole batch.

    Args:
        count: over all processes.
    """
    for parameter in model.parameters():
        if parameter.requires_grad:
            if parameter.grad is None:  # this process had no example left
                parameter.grad = torch.zeros_like(parameter)
            all_reduce(parameter.grad)
            parameter.grad /= count.clamp(min=1).to(parameter.grad.dtype)


def all_reduce(tensor: Tensor) -> Tensor:
    """In place, the sum over all processes."""
    if dist.is_initialized():
        dist.all_reduce(tensor)
    return tensor


@torch.no_grad()
def evaluate(task: Task, model: nn.Module, dataset: Examples, batch_size: int) -> dict[str, float]:
    """Loss and, on process 0, metrics over the whole dataset, computed by this process alone."""
    device = next(model.parameters()).device
    is_training = model.training
    model.eval()
    loss_sum, count, outputs = 0.0, 0.0, []
    for indices in np.split(np.arange(len(dataset)), range(batch_size, len(dataset), batch_size)):
        batch = send_to_device(fetch(task, dataset, indices.tolist()), device)
        loss, counted, batch_outputs = task.evaluate(model, batch)
        loss_sum, count = loss_sum + float(loss), count + float(counted)
        outputs.append({name: output.cpu() for name, output in batch_outputs.items()})
    model.train(is_training)
    gathered = {name: torch.cat([batch[name] for batch in outputs]) for name in outputs[0]}
    is_main = not dist.is_initialized() or dist.get_rank() == 0
    return {"loss": loss_sum / count, "examples": len(dataset), **(task.metrics(gathered) if is_main else {})}


def main(argv: list[str]) -> None:
    """Trains, and prints each step's loss."""
    config = load_config(argv)
    on_gpu = torch.cuda.is_available()
    dist.init_process_group("nccl" if on_gpu else "gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    device = torch.device("cuda", rank % torch.cuda.device_count()) if on_gpu else torch.device("cpu")
    if rank > 0:
        dist.barrier()
    train_set, eval_set = config.task.build_datasets()
    if rank == 0:
        dist.barrier()
    set_seed(config.seed)
    model = config.task.build_model().to(device)
    for tensor in model.state_dict().values():
        dist.broadcast(tensor, src=0)
    optimizers = build_optimizers(config.optim, model)
    set_seed((config.seed + rank) % 2**32)  # other dropout on each

    sampler = DistributedSampler(config, train_set, rank, world_size)
    steps_per_epoch = -(-len(train_set) // config.global_batch_size)
    total_steps, schedule_steps = config.steps(steps_per_epoch)
    started, step = time.perf_counter(), 0
    while step < total_steps:
        epoch = step // steps_per_epoch
        sampler.set_epoch(epoch)
        epoch_set = config.task.augmented(train_set, [config.seed, epoch, 1])
        for indices in sampler:
            batches = [fetch(config.task, epoch_set, indices.tolist())] if len(indices) else []
            loss_sum, count = map(all_reduce, backward(config.task, model, batches))
            average_gradients(model, count)
            if config.optim.max_grad_norm is not None:
                nn.utils.clip_grad_norm_(model.parameters(), config.optim.max_grad_norm)
            set_lr(optimizers, lr_at(step, config.optim, schedule_steps, steps_per_epoch))
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
            step += 1
            if rank == 0:
                print(f"step {step}  loss {(loss_sum / count).item():.9g}", flush=True)
            if step == total_steps:
                break
    milliseconds = 1000 * (time.perf_counter() - started) / total_steps
    results = evaluate(config.task, model, eval_set, 1000)
    if rank == 0:
        scores = "  ".join(f"{name} {value:.4f}" for name, value in results.items())
        print(f"{milliseconds:.2f} ms per step, {world_size} processes; evaluation: {scores}", flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    with exit_codes("reference"):
        main(sys.argv[1:])
