"""What is examined: the run, and the copy of its model that it is held against."""

from __future__ import annotations

import contextlib
import hashlib
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from accelerate.utils import broadcast, extract_model_from_parallel, set_seed
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from src.check.findings import gather
from src.data.loading import MicroBatch, training_steps
from src.optim import build_optimizers, to_local
from src.preemption import StopSignal
from src.progress import Progress, StepResult
from src.run import Evaluation, Run, new_model

TrainStep = Callable[[Run, list[MicroBatch], StopSignal], StepResult]
Evaluate = Callable[[Run, StopSignal], "Evaluation | None"]


class Subject:
    """The run, no step taken yet, and the reference: on each process an unwrapped copy of its model with optimizers of
    its own, whole whatever the strategy."""

    def __init__(self, run: Run, train_step: TrainStep, evaluate: Evaluate) -> None:
        """Args:
        run: as train.py has prepared it.
        train_step, evaluate: train.py's own.
        """
        self.run, self.train_step, self.evaluate = run, train_step, evaluate
        self.rng_checksum = checksum([torch.get_rng_state()])
        """Of the generator as train.py left it: equal where the same numbers are drawn next."""
        self.stop = StopSignal(run.accelerator, run.config.model_copy(update={"max_hours": None}))
        self.is_fsdp = run.accelerator.is_fsdp2
        self.half = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(run.launch.precision)
        """The half precision that autocast computes in, if any."""
        self.is_half = run.launch.precision != "fp32"
        self.steps_per_epoch = -(-len(run.train_set) // run.config.global_batch_size)
        self._loss_scale = run.progress.loss_scale
        self.reference = new_model(run.config, run.launch)[0].to(run.device).train()
        self.reference_optimizers = build_optimizers(run.config.optim, self.reference, self.is_fsdp)

    @property
    def autocasts_to_bf16(self) -> bool:
        """Whether the run computes as the reference does under autocast to bf16."""
        return self.half is torch.bfloat16 and not self.is_fsdp

    @property
    def unwrapped(self) -> nn.Module:
        """The run's model without its wrapper; FSDP leaves shards in it."""
        return extract_model_from_parallel(self.run.model)

    def at(self, step: int, **changes: Any) -> Run:
        """Return the run as it is after `step` steps.

        Args:
            changes: fields of Run.
        """
        return replace(self.run, progress=Progress(step=step, loss_scale=self._loss_scale), **changes)

    def micro_batches(self, first: int, size: int | None = None) -> Iterator[list[MicroBatch]]:
        """Yield this process's micro-batches of each step from `first` on, without end."""
        config = self.run.config
        config = config.model_copy(update={"micro_batch_size": size or config.micro_batch_size})
        return training_steps(replace(self.run, config=config), first, 10**12)

    def step(self, run: Run, micro_batches: list[MicroBatch]) -> StepResult:
        """Take the run's own step; in fp16 again, with a smaller loss scale and random numbers from `seed`, where it
        overflows."""
        counts = optimizer_counts(run)
        for parameter in run.model.parameters():
            if not counts[id(parameter)]:  # nobody clears its gradient: that is told in Updates, once
                parameter.grad = None
        while True:
            result = self.train_step(run, micro_batches, self.stop)
            if result.grad_norm is not None or run.progress.skipped_in_a_row:
                return result
            self._loss_scale = run.progress.loss_scale
            self.seed()

    def seed(self) -> None:
        """Make what follows draw the same random numbers as after any other call, on each process its own."""
        set_seed((self.run.config.seed + self.run.rank) % 2**32)

    def drifted(self) -> list[str]:
        """Return the names of what should be the same on all processes, and is not. Collective.

        Of buffers, those that DDP doesn't send from the first process to the others before the next forward pass.
        """
        held = [(name, p) for name, p in self.unwrapped.named_parameters() if not isinstance(p, DTensor)]
        if not (isinstance(self.run.model, DistributedDataParallel) and self.run.model.broadcast_buffers):
            held += list(self.unwrapped.named_buffers())
        everywhere = gather({name: checksum([tensor]) for name, tensor in held})
        return [name for name, _ in held if len({sums[name] for sums in everywhere}) > 1]

    def copy_to_reference(self) -> None:
        """Give the reference the run's weights and buffers. Collective."""
        ours = dict(named_tensors(self.reference))
        for name, tensor in named_tensors(self.unwrapped):
            found = whole(tensor, self.run.device)
            if name in ours and ours[name].shape == found.shape:
                ours[name].data.copy_(found)
            elif name in ours:  # a buffer that grows with what was seen; what is not there is told in Same start
                ours[name].data = found.clone()

    @contextlib.contextmanager
    def perturbed(self) -> Iterator[None]:
        """Put noise of twice their size on the reference's trained weights, and the first process's into the run's
        model: to a fresh model all examples are much alike, so that their losses could be averaged in any way.
        Collective."""
        pairs = list(zip(self.reference.parameters(), self.unwrapped.parameters(), strict=True))
        kept = [(to_local(p), to_local(p).detach().clone()) for pair in pairs for p in pair]
        generator = torch.Generator().manual_seed(0)
        with torch.no_grad():
            for ours, theirs in pairs:
                if ours.requires_grad:
                    size = 2 * ours.square().mean().sqrt().clamp(min=0.02)
                    ours.add_(size * torch.randn(ours.shape, generator=generator).to(ours))
                to_local(theirs).copy_(to_local(shard_like(broadcast(ours.detach().clone()), theirs)))
        yield
        with torch.no_grad():
            for p, value in kept:
                p.copy_(value)


class Autocast(nn.Module):
    """A model whose forward pass alone is under autocast, as Accelerate has it."""

    def __init__(self, model: nn.Module, dtype: torch.dtype | None) -> None:
        """Args:
        dtype: None: without autocast.
        """
        super().__init__()
        self.model, self.dtype = model, dtype
        self.training = model.training

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        device = next(self.model.parameters()).device.type
        with torch.autocast(device, self.dtype, enabled=self.dtype is not None):
            return self.model(*args, **kwargs)


class WithheldOptimizer(Optimizer):
    """Takes an optimizer's place in a step, and leaves the weights and its state as they are."""

    def __init__(self, optimizer: Optimizer) -> None:
        super().__init__(optimizer.param_groups, {})

    def step(self, closure: Any = None) -> None:
        pass


@dataclass
class Update:
    """What a run has in hand when it is about to update the weights; nothing where it does not come to that."""

    gradients: dict[str, Tensor] = field(default_factory=dict)
    """Whole, by the parameter's name; scaled and clipped."""
    learning_rates: list[float] = field(default_factory=list)
    """Of each parameter group."""


@contextlib.contextmanager
def capture_update(run: Run) -> Iterator[Update]:
    """Yield what is filled in when the step inside comes to its update."""
    update = Update()

    def capture(*_: object) -> None:
        for name, parameter in extract_model_from_parallel(run.model).named_parameters():
            if parameter.grad is not None:
                update.gradients[name] = whole(parameter.grad, run.device).clone()
        update.learning_rates = [float(group["lr"]) for o in run.optimizers for group in o.param_groups]

    hook = run.optimizers[0].register_step_pre_hook(capture)
    yield update
    hook.remove()


def optimizer_counts(run: Run) -> Counter[int]:
    """Return how often optimizers have a parameter, by its `id`."""
    return Counter(id(p) for o in run.optimizers for group in o.param_groups for p in group["params"])


def named_tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield parameters, tied ones once, and buffers, by name."""
    yield from model.named_parameters()
    yield from model.named_buffers()


def shard_like(tensor: Tensor, like: Tensor) -> Tensor:
    """Return this process's shard of it, where `like` is sharded."""
    if not isinstance(like, DTensor):
        return tensor
    return distribute_tensor(tensor.detach().to(like.device), like.device_mesh, like.placements, src_data_rank=None)


@torch.no_grad()
def whole(tensor: Tensor, device: torch.device) -> Tensor:
    """Return all of it on `device`. Collective where it is sharded."""
    if not isinstance(tensor, DTensor):
        return tensor.detach().to(device)
    local = tensor.to_local().to(device)  # offloaded shards are on the CPU, and NCCL is not
    return DTensor.from_local(
        local, tensor.device_mesh, tensor.placements, run_check=False, shape=tensor.shape, stride=tensor.stride()
    ).full_tensor()


def checksum(tensors: list[Tensor]) -> str:
    """Return what is equal where all values are, to the last bit."""
    digest = hashlib.sha256()
    for tensor in tensors:
        # a copy, as FSDP can't free the memory of what has been a numpy array
        copied = to_local(tensor).detach().to("cpu", copy=True)
        digest.update(copied.contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()[:12]
