"""What is examined: the run, and the copy of its model that it is compared with."""

import contextlib
import hashlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import Any

import torch
from accelerate.utils import broadcast, extract_model_from_parallel, set_seed
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils._pytree import tree_leaves

from src.check.findings import gather
from src.distributed.stop import StopSignal
from src.training.batches import CountedSteps, MicroBatch, TrainStep, training_steps
from src.training.evaluation import Evaluation
from src.training.gradients import to_local
from src.training.optim import build_optimizers
from src.training.progress import Progress, StepResult
from src.training.run import Run, new_model

Evaluate = Callable[[Run, StopSignal], Evaluation | None]
Restore = Callable[[Run], None]


class Subject:
    """The run before its first step, and the reference: on each process an unwrapped copy of its model with optimizers
    of its own."""

    def __init__(self, run: Run, train_step: TrainStep, evaluate: Evaluate, restore: Restore) -> None:
        self.run, self.train_step, self.evaluate, self.restore = run, train_step, evaluate, restore
        self.rng_checksum = checksum(torch.get_rng_state())
        """Checksum of the generator as train.py left it: equal if the same numbers are drawn next."""
        self.stop = StopSignal(run.accelerator, run.config.model_copy(update={"max_hours": None}))
        self.is_fsdp = run.accelerator.is_fsdp2
        self.steps_per_epoch = -(-len(run.train_set) // run.config.global_batch_size)  # as the run's own should be
        config = self.at(0, task=run.task.reference()).config
        self.reference = new_model(config, run.launch.device, run.launch.precision)[0].to(run.device).train()
        self.reference_optimizers = build_optimizers(config.optim, self.reference)

    @property
    def unwrapped(self) -> nn.Module:
        """The run's model without its wrapper; FSDP leaves shards in it."""
        return extract_model_from_parallel(self.run.model)

    def at(self, step: int, **settings: Any) -> Run:
        """Return the run as it is after `step` steps, with other settings."""
        return replace(self.run, progress=Progress(step=step), config=self.run.config.model_copy(update=settings))

    def micro_batches(self, first: int, **settings: Any) -> Iterator[list[MicroBatch]]:
        """Yield this process's micro-batches for each step from `first` on, without end."""
        return training_steps(self.at(first, **settings), first, 10**12)

    def step(self, run: Run, micro_batches: list[MicroBatch]) -> StepResult:
        """Take the run's own step."""
        optimized = {p for optimizer in run.optimizers for group in optimizer.param_groups for p in group["params"]}
        for parameter in run.model.parameters():
            if parameter not in optimized:  # nobody clears its gradient: Updates reports that, once
                parameter.grad = None
        _, counts = next(CountedSteps(iter([micro_batches]), self.stop))
        return self.train_step(run, micro_batches, counts)

    def seed(self) -> None:
        """Make what follows draw the same random numbers as after any other call, on each process its own."""
        set_seed((self.run.config.seed + self.run.rank) % 2**32)

    def drifted(self) -> list[str]:
        """Return the names of what should be the same on all processes, and is not. Collective.

        Of buffers, those that DDP doesn't send from the first process to the others before the next forward pass.
        """
        is_broadcast = isinstance(self.run.model, DistributedDataParallel) and self.run.model.broadcast_buffers
        held = dict(self.unwrapped.named_parameters()) if is_broadcast else named_tensors(self.unwrapped)
        sums = {name: checksum(tensor) for name, tensor in held.items() if not isinstance(tensor, DTensor)}
        everywhere = gather(sums)
        return [name for name in sums if any(other[name] != sums[name] for other in everywhere)]

    def copy_to_reference(self) -> None:
        """Give the reference the run's weights and buffers. Collective."""
        ours = named_tensors(self.reference)
        for name, tensor in named_tensors(self.unwrapped).items():
            found = whole(tensor, self.run.device)
            if name in ours:  # Same start reports what is not there
                ours[name].data = found.clone()

    @contextlib.contextmanager
    def perturbed(self) -> Iterator[None]:
        """Add noise of twice their size to the run's trained weights, and give them to the reference: to a fresh model
        all examples are much alike, so that any way to average their losses would pass. Collective."""
        kept = [to_local(parameter).detach().clone() for parameter in self.run.parameters]
        generator = torch.Generator().manual_seed(0)
        with torch.no_grad():
            for ours, theirs in zip(self.reference.parameters(), self.run.parameters, strict=True):
                if ours.requires_grad:
                    size = 2 * ours.square().mean().sqrt().clamp(min=0.02)
                    ours.add_(size * torch.randn(ours.shape, generator=generator).to(ours))
                to_local(theirs).copy_(to_local(shard_like(broadcast(ours.detach().clone()), theirs)))
            yield
            for parameter, value in zip(self.run.parameters, kept, strict=True):
                to_local(parameter).copy_(value)
            self.copy_to_reference()


@contextlib.contextmanager
def capture_update(run: Run) -> Iterator[dict[str, Tensor]]:
    """Yield a dict that the run inside fills, when it is about to update its weights, with the gradients that it uses:
    by name, whole, scaled and clipped."""
    gradients: dict[str, Tensor] = {}

    def capture(*_: Any) -> None:
        for name, parameter in extract_model_from_parallel(run.model).named_parameters():
            if parameter.grad is not None:
                gradients[name] = whole(parameter.grad, run.device).clone()

    hook = run.optimizers[0].register_step_pre_hook(capture)
    yield gradients
    hook.remove()


def named_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Return the parameters, tied ones once, and the buffers, by name."""
    return dict([*model.named_parameters(), *model.named_buffers()])


def shard_like(tensor: Tensor, like: Tensor) -> Tensor:
    """Return `tensor`, sharded in the way that `like` is."""
    if not isinstance(like, DTensor):
        return tensor
    return distribute_tensor(tensor.detach().to(like.device), like.device_mesh, like.placements, src_data_rank=None)


@torch.no_grad()
def whole(tensor: Tensor, device: torch.device) -> Tensor:
    """Return the whole tensor on `device`. Collective if it is sharded."""
    if not isinstance(tensor, DTensor):
        return tensor.detach().to(device)
    local = tensor.to_local().to(device)  # offloaded shards are on the CPU, where NCCL cannot gather
    mesh, shape, stride = tensor.device_mesh, tensor.shape, tensor.stride()
    return DTensor.from_local(local, mesh, tensor.placements, shape=shape, stride=stride).full_tensor()


def checksum(tree: Any) -> str:
    """Return a checksum that is equal if the values of all tensors in the tree are, to the last bit."""
    digest = hashlib.sha256()
    for tensor in tree_leaves(tree):
        if isinstance(tensor, Tensor):  # a copy, as FSDP can't free the memory of what has been a numpy array
            copied = to_local(tensor).detach().to("cpu", copy=True)
            digest.update(copied.contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()[:12]


def num_bytes(tensors: Iterable[Tensor]) -> int:
    """Return the bytes that the tensors take together."""
    return sum(tensor.nbytes for tensor in tensors)
