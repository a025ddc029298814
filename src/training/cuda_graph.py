"""Capture an optimizer step as a CUDA graph, and replay it: `cuda_graphs=true`.

A small model's step is a hundred kernels of microseconds each, and Python takes longer to launch them one by one than
the GPU to run them. A graph launches all of them at once: it takes the host 0.17 ms instead of 2.2 for the MNIST CNN.
A replay repeats the captured kernels on the same memory: so each batch is copied to where the captured one was, and the
learning rate is a tensor. torch advances the random number generator by as much as the step drew, so that each replay
has its own dropout, the same as without a graph.
https://docs.pytorch.org/docs/stable/notes/cuda.html#cuda-graphs
"""

from typing import Any

import torch
from accelerate.utils import recursively_apply
from torch import Tensor
from torch.optim import Optimizer

from src.config.config import Config
from src.config.environment import LaunchEnv
from src.config.errors import UserError
from src.distributed.launcher import unusable_gpu
from src.tasks.base import Counts
from src.training.batches import Fetched, MicroBatch, TrainStep
from src.training.optim import lr_at
from src.training.progress import StepResult
from src.training.run import Run

WARM_UP_STEPS = 3
"""Steps before the captured one, in which libraries choose algorithms and allocate their workspaces."""


def require_one_gpu(config: Config[Any]) -> None:
    """Raise a UserError if the settings ask for graphs of steps that cannot be captured."""
    if not config.cuda_graphs:
        return
    asked = LaunchEnv()
    is_alone = asked.world_size == config.gradient_accumulation_steps(1) == 1
    is_cuda = not asked.cpu and torch.cuda.is_available()
    is_fp16 = asked.precision == "fp16" and config.mode != "check"  # which computes in fp32
    if not (is_alone and is_cuda) or is_fp16 or config.optim.name == "muon":
        reason = None if asked.cpu or is_cuda else unusable_gpu()
        needs = "cuda_graphs=true needs one NVIDIA GPU, without accumulation, fp16 or muon"
        raise UserError(*filter(None, [reason, needs]))


def capture(run: Run, steps: Fetched, take_step: TrainStep) -> tuple[Fetched, TrainStep]:
    """Return the steps, and what captures and replays them if the settings ask for that."""
    return steps, CapturedStep(run, take_step) if run.config.cuda_graphs else take_step


class CapturedStep:
    """Takes steps as `train_step` does: the first three by calling it, the others by replaying a graph of the fourth.
    An epoch's last batch, if it is smaller, goes through `train_step` too."""

    def __init__(self, run: Run, train_step: TrainStep) -> None:
        self._train_step = train_step
        self._groups = [group for optimizer in run.optimizers for group in optimizer.param_groups]
        for group in self._groups:
            # a float would be frozen at its captured value; fused optimizers ignore `capturable`
            group |= {"lr": torch.zeros((), device=run.device), "capturable": True}
        for optimizer in run.optimizers:
            # a checkpoint may have been saved without a graph: its step counts are on the CPU
            for state in optimizer.state.values():
                state |= {name: value.to(run.device) for name, value in state.items()}
        self._warmed_up = 0
        self._stream = torch.cuda.Stream()
        self._graph = torch.cuda.CUDAGraph()
        self._captured: Any = None

    def __call__(self, run: Run, micro_batches: list[MicroBatch], counts: Counts) -> StepResult:
        """Take the step.

        Raises:
            UserError: the batch differs from the captured one in shapes or in its number of targets.
        """
        (batch,) = micro_batches
        lr = lr_at(run.progress.step, run.config.optim, *run.schedule)
        for group in self._groups:
            group["lr"].fill_(lr * group.get("lr_scale", 1.0))
        if batch.num_examples < run.config.global_batch_size:
            return self._train_step(run, micro_batches, counts)
        if self._warmed_up < WARM_UP_STEPS:
            return self._warm_up(run, micro_batches, counts)
        # the number of targets is part of the loss's factor, a Python float
        signature = recursively_apply(lambda tensor: tensor.shape, batch.data), counts["targets"]
        if self._captured is None:
            self._captured = signature
            self._capture(run, batch, counts)
        if signature != self._captured:
            raise UserError("cuda_graphs=true needs batches of one shape, but this task's differ: set it to false")

        torch._foreach_copy_(self._inputs, tensors_in(batch.data))
        self._graph.replay()
        # the graph does not advance the host's counter
        run.progress.step += 1
        # copies, as the next replay overwrites them before they are read
        return StepResult(counts, lr, [self._loss.clone()], self._norm.clone())

    def _warm_up(self, run: Run, micro_batches: list[MicroBatch], counts: Counts) -> StepResult:
        """Take a step on the stream that will be captured, as autograd runs backward where forward ran."""
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            result = self._train_step(run, micro_batches, counts)
        torch.cuda.current_stream().wait_stream(self._stream)
        # a skipped step doesn't count: the optimizer may have no state yet
        self._warmed_up += result.finite_norm is not None
        return result

    def _capture(self, run: Run, batch: MicroBatch, counts: Counts) -> None:
        """Capture the step of a batch of this shape. Nothing is computed, and the run does not advance."""
        for optimizer in run.optimizers:
            if not optimizer.defaults.get("fused"):
                undo_unless_finite(optimizer)
        # the graph reads its inputs from here, for as long as it lives
        data = recursively_apply(torch.clone, batch.data)
        self._inputs = tensors_in(data)
        step = run.progress.step
        # other threads keep using the GPU, such as the one that writes checkpoints
        with torch.cuda.graph(self._graph, stream=self._stream, capture_error_mode="thread_local"):
            result = self._train_step(run, [batch._replace(data=data)], counts)
        (self._loss,), self._norm = result.losses, result.norm
        # train_step has counted the step, but its kernels did not run
        run.progress.step = step


def undo_unless_finite(optimizer: Optimizer) -> None:
    """Have an optimizer with state undo its step on the device where the gradients are non-finite, as fused optimizers
    skip it: a graph can't wait for the host."""
    optimizer.defaults["fused"] = True  # step_if_finite then leaves this to the optimizer
    step = optimizer.step

    def step_or_undo() -> None:
        # a copy of weights and state is affordable for the small models that graphs are meant for
        changed = [p.detach() for group in optimizer.param_groups for p in group["params"]]
        changed += [value for state in optimizer.state.values() for value in state.values()]
        before = [tensor.clone() for tensor in changed]
        step()
        is_finite = optimizer.found_inf == 0  # type: ignore[attr-defined]
        # select, don't multiply by 0: NaN times 0 is NaN
        for after, was in zip(changed, before, strict=True):
            torch.where(is_finite, after, was, out=after)

    optimizer.step = step_or_undo  # type: ignore[assignment]


def tensors_in(data: Any) -> list[Tensor]:
    """Return the tensors in nested lists, tuples and mappings, in order, as the signature and the captured copy have
    them: also in those that pytree does not know, such as a tokenizer's BatchEncoding."""
    found: list[Tensor] = []
    recursively_apply(found.append, data)
    return found
