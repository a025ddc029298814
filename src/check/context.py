"""What the checks examine: the run, and the reference that it is compared with."""

import hashlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from accelerate.utils import set_seed
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves

from src.distributed.stop import StopSignal
from src.tasks.base import ALONE, Tensors
from src.training.batches import CountedSteps, MicroBatch, TrainStep, training_steps
from src.training.evaluation import Evaluation
from src.training.gradients import to_local
from src.training.optim import build_optimizers, extended
from src.training.progress import Progress, StepResult
from src.training.run import Run, new_model

Evaluate = Callable[[Run, StopSignal], Evaluation | None]


@dataclass
class CheckContext:
    """The run before its first step, and the reference: on each process an unwrapped copy of its model with its own
    optimizers."""

    run: Run
    train_step: TrainStep
    evaluate: Evaluate

    def __post_init__(self) -> None:
        run = self.run
        self.unwrapped: nn.Module = run.accelerator.unwrap_model(run.model)
        """The run's model without its wrapper; under FSDP it is still sharded."""
        self.rng_checksum = checksum(torch.get_rng_state())
        """Checksum of the random state as train.py left it: equal if the same numbers are drawn next."""
        self.stop = StopSignal(run.accelerator, self.at(0, max_hours=None).config)
        self.task = run.task.bind(replace(run.task.state, cp=ALONE, optimizations=[], remarks=[]))
        """The reference's task, with whole examples where the run splits them."""
        config = self.at(0, task=self.task).config
        self.reference = new_model(config)[0].to(run.device).train()
        self.reference_optimizers = extended(config, self.reference, build_optimizers(config.optim, self.reference))

    def at(self, step: int, **settings: Any) -> Run:
        """Return the run as it would be after `step` steps, with these settings changed."""
        return replace(self.run, progress=Progress(step=step), config=self.run.config.model_copy(update=settings))

    def micro_batches(self, step: int, **settings: Any) -> list[MicroBatch]:
        """Return this process's micro-batches for the step after `step` steps, with these settings changed."""
        return next(training_steps(self.at(step, **settings), step, step + 1))

    def step(self, run: Run, micro_batches: list[MicroBatch]) -> StepResult:
        """Take a step with the run's own train_step."""
        return self.train_step(run, *next(CountedSteps(iter([micro_batches]), self.stop)))

    def seed(self) -> None:
        """Seed the random numbers: the same in each call, different on each process."""
        set_seed((self.run.config.seed + self.run.rank) % 2**32)

    def all_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the run's parameters and buffers, unsharded, each with its name. Collective."""
        for name, tensor in named_tensors(self.unwrapped).items():
            yield name, unsharded(tensor, self.run.device)

    def copy_to_reference(self) -> None:
        """Copy the run's weights and buffers to the reference. Collective."""
        copies = named_tensors(self.reference)
        for name, tensor in self.all_tensors():
            copies[name].data = tensor.clone()

    @torch.no_grad()
    def perturb(self) -> None:
        """Add noise of twice their size to the run's trained weights, and copy them to the reference. (A fresh model's
        losses are all alike, so any way to average them would pass.) Collective."""
        generator = torch.Generator().manual_seed(0)  # the same noise on all replicas
        for parameter in self.run.parameters:
            if parameter.requires_grad:
                own = to_local(parameter)
                size = 2 * own.square().mean().sqrt().clamp(min=0.02)
                own.add_(size * torch.randn(own.shape, generator=generator).to(own))
        self.copy_to_reference()


def named_tensors(model: nn.Module) -> Tensors:
    """Return the parameters (tied ones once) and buffers by name."""
    return dict([*model.named_parameters(), *model.named_buffers()])


@torch.no_grad()
def unsharded(tensor: Tensor, device: torch.device) -> Tensor:
    """Return all of the tensor on `device`. Collective if it is sharded."""
    tensor = tensor.to(device)  # offloaded shards are on the CPU, where NCCL can't gather
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def checksum(tree: Any) -> str:
    """Return a checksum of the tensors in a tree, which is equal only if they are bitwise equal."""
    digest = hashlib.sha256()
    for tensor in tree_leaves(tree):
        if isinstance(tensor, Tensor):  # copy, as FSDP can't free the memory behind a numpy array
            copied = to_local(tensor).detach().to("cpu", copy=True)
            digest.update(copied.flatten().view(torch.uint8).numpy().data)
    return digest.hexdigest()[:12]
