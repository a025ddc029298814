"""What is examined, and the copy of its model that it is held against."""

from __future__ import annotations

import contextlib
import hashlib
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
from accelerate import Accelerator
from accelerate.utils import broadcast, extract_model_from_parallel, gather_object, set_seed
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from src.data.loading import MicroBatch, training_steps
from src.config import Config
from src.launch import Launch
from src.optim import Schedule, build_optimizers, to_local
from src.preemption import StopSignal
from src.progress import Progress, Step
from src.tasks.base import Examples, Task


@dataclass
class Subject:
    """The run as train.py has prepared it, no step taken yet, and its own step and evaluation."""

    accelerator: Accelerator
    launch: Launch
    config: Config
    train_set: Examples
    eval_set: Examples
    model: nn.Module
    optimizers: list[Optimizer]
    schedule: Schedule
    about: dict[str, Any]
    """What its checkpoints say of it."""
    optimizer_step: Callable[..., Step]
    evaluate: Callable[..., Any]

    def __post_init__(self) -> None:
        self.stop = StopSignal(self.accelerator, self.config.model_copy(update={"max_hours": None}))
        self.random_numbers = checksum([torch.get_rng_state()])
        """Of the generator as train.py left it: equal where the same are drawn next."""
        self._loss_scale = Progress().loss_scale if self.launch.precision == "fp16" else 1.0

    @property
    def times_optimized(self) -> Counter[int]:
        """How often optimizers have a parameter, by its `id`."""
        return Counter(id(p) for o in self.optimizers for group in o.param_groups for p in group["params"])

    @property
    def task(self) -> Task:
        return self.config.task

    @property
    def device(self) -> torch.device:
        return self.accelerator.device

    @property
    def world_size(self) -> int:
        return self.accelerator.num_processes

    @property
    def half(self) -> torch.dtype | None:
        """What it computes in, where that is half precision."""
        return {"bf16": torch.bfloat16, "fp16": torch.float16}.get(self.launch.precision)

    @property
    def is_half(self) -> bool:
        """Whether it computes in half precision."""
        return self.launch.precision != "fp32"

    @property
    def autocasts_to_bf16(self) -> bool:
        """Whether it computes as the reference does under autocast to bf16."""
        return self.launch.precision == "bf16" and not self.accelerator.is_fsdp2

    def progress(self, step: int) -> Progress:
        """As it is after `step` steps."""
        return Progress(step=step, loss_scale=self._loss_scale)

    def windows(self, first: int, micro_batch_size: int | None = None) -> Iterator[list[MicroBatch]]:
        """This process's micro-batches from step `first` on, without end."""
        size = {"micro_batch_size": micro_batch_size or self.config.micro_batch_size}
        config = self.config.model_copy(update=size)
        return training_steps(self.accelerator, config, self.train_set, first, 10**12)

    def step(self, window: list[MicroBatch], progress: Progress, max_grad_norm: float | None = None) -> Step:
        """The run's own; in fp16 again, with a smaller loss scale and random numbers from `seed`, where it overflows.

        Args:
            max_grad_norm: in place of the setting.
        """
        optim = self.config.optim
        if max_grad_norm is not None:
            optim = optim.model_copy(update={"max_grad_norm": max_grad_norm})
        config = self.config.model_copy(update={"optim": optim})
        times_optimized = self.times_optimized
        for parameter in self.model.parameters():
            if not times_optimized[id(parameter)]:  # nobody clears its gradient: that is told in Updates, once
                parameter.grad = None
        while True:
            done = self.optimizer_step(
                self.accelerator, config, self.model, self.optimizers, progress, window, self.schedule, self.stop
            )
            if done.grad_norm is not None or progress.skipped_in_a_row:
                return done
            self._loss_scale = progress.loss_scale
            self.seed()

    def seed(self) -> None:
        """What follows draws the same random numbers as after any other call, on each process its own."""
        set_seed((self.config.seed + self.accelerator.process_index) % 2**32)

    def seed_alike(self) -> None:
        """The same on all processes."""
        set_seed(self.config.seed)

    def bare(self) -> nn.Module:
        """The model without its wrapper; FSDP leaves shards in it."""
        return extract_model_from_parallel(self.model)

    @contextlib.contextmanager
    def holding(self, reference: Reference) -> Iterator[None]:
        """With the first process's reference's weights in place of its own. Collective."""
        own = [to_local(p) for p in self.bare().parameters()]
        kept = [p.detach().clone() for p in own]
        with torch.no_grad():
            for p, held, given in zip(own, self.bare().parameters(), reference.model.parameters(), strict=True):
                p.copy_(to_local(share_of(broadcast(given.detach().clone()), held)))
        yield
        with torch.no_grad():
            for p, value in zip(own, kept, strict=True):
                p.copy_(value)

    def drifted(self) -> list[str]:
        """The names of what should be the same on all processes, and is not. Collective.

        Of buffers, those that DDP doesn't send from the first process to the others before the next forward pass.
        """
        held: list[tuple[str, Tensor]]
        held = [(name, p) for name, p in self.bare().named_parameters() if not isinstance(p, DTensor)]
        if not (isinstance(self.model, DistributedDataParallel) and self.model.broadcast_buffers):
            held += list(self.bare().named_buffers())
        everywhere = self.gather({name: checksum([tensor]) for name, tensor in held})
        return [name for name, _ in held if len({sums[name] for sums in everywhere}) > 1]

    def gather(self, fact: Any) -> list[Any]:
        """Each process's, in the order of their ranks, on all of them. Collective."""
        return gather_object([fact])


class Reference:
    """An unwrapped copy of the model with optimizers of its own, as one process would have it.

    A process needs the memory for it and its optimizers' state, whole, whatever the strategy.
    """

    def __init__(self, subject: Subject) -> None:
        subject.seed_alike()
        self.model = subject.task.build_model().to(subject.device)
        self.model.train()
        self.optimizers: list[Optimizer] = build_optimizers(
            subject.config.optim, self.model, subject.accelerator.is_fsdp2
        )

    @contextlib.contextmanager
    def autocast(self, dtype: torch.dtype | None) -> Iterator[None]:
        """As Accelerate does it: the forward pass alone. None: without."""
        autocast = torch.autocast(next(self.model.parameters()).device.type, dtype, enabled=dtype is not None)
        with mock.patch.object(self.model, "forward", autocast(self.model.forward)):
            yield

    @contextlib.contextmanager
    def perturbed(self) -> Iterator[None]:
        """With noise on the trained weights, the same on all processes, of twice their size: to a fresh model all
        examples are much alike, so that their losses could be averaged in any way."""
        trained = [p for p in self.model.parameters() if p.requires_grad]
        kept = [p.detach().clone() for p in trained]
        generator = torch.Generator().manual_seed(0)
        with torch.no_grad():
            for p in trained:
                size = 2 * p.square().mean().sqrt().clamp(min=0.02)
                p.add_(size * torch.randn(p.shape, generator=generator).to(p))
        yield
        with torch.no_grad():
            for p, value in zip(trained, kept, strict=True):
                p.copy_(value)

    def copy_from(self, subject: Subject) -> None:
        """Takes over the run's weights and buffers. Collective."""
        ours = dict(tensors(self.model))
        for name, tensor in tensors(subject.bare()):
            found = whole(tensor, subject.device)
            if name in ours and ours[name].shape == found.shape:
                ours[name].data.copy_(found)
            elif name in ours:  # a buffer that grows with what was seen; what is not there is told in Same start
                ours[name].data = found.clone()


def share_of(tensor: Tensor, like: Tensor) -> Tensor:
    """This process's shard of it, where `like` is sharded."""
    if not isinstance(like, DTensor):
        return tensor
    return distribute_tensor(tensor.detach().to(like.device), like.device_mesh, like.placements, src_data_rank=None)


def tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Parameters, tied ones once, and buffers, by name."""
    yield from model.named_parameters()
    yield from model.named_buffers()


@torch.no_grad()
def whole(tensor: Tensor, device: torch.device) -> Tensor:
    """All of it on `device`. Collective where it is sharded."""
    if not isinstance(tensor, DTensor):
        return tensor.detach().to(device)
    local = tensor.to_local().to(device)  # offloaded shards are on the CPU, and NCCL is not
    return DTensor.from_local(
        local, tensor.device_mesh, tensor.placements, run_check=False, shape=tensor.shape, stride=tensor.stride()
    ).full_tensor()


def checksum(found: list[Tensor]) -> str:
    """Equal where all values are, to the last bit."""
    digest = hashlib.sha256()
    for tensor in found:
        copied = (
            to_local(tensor).detach().to("cpu", copy=True)
        )  # FSDP can't free the memory of what has been a numpy array
        digest.update(copied.contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()[:12]
