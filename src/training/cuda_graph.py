"""An optimizer step that is recorded once, as a CUDA graph, and then replayed: `cuda_graphs=true`.

A small model's step is a hundred kernels of microseconds each, and Python takes longer to launch them one by one than
the GPU to run them. A graph launches all of them at once. It repeats what was recorded, on the same memory: so a batch
is copied to where the recorded one was, and the learning rate is a tensor. torch moves the random number generator on
by as much as the step drew, so that each replay has dropout of its own, the same as without a graph.
https://docs.pytorch.org/docs/stable/notes/cuda.html#cuda-graphs
"""

from typing import Any

import torch
from accelerate.utils import recursively_apply
from torch import Tensor

from src.config.errors import UserError
from src.training.batches import MicroBatch, TrainStep
from src.training.optim import lr_at
from src.training.progress import StepCounts, StepResult
from src.training.run import Run

WARM_UP_STEPS = 3
"""Steps before the one that is recorded: libraries choose their algorithms and allocate their workspaces in them."""


class RecordedStep:
    """Take steps as `train_step` does: the first three by calling it, the others by replaying a record of the fourth.
    An epoch's last batch, if it is smaller, goes through `train_step` too."""

    def __init__(self, run: Run, train_step: TrainStep) -> None:
        self._train_step = train_step
        self._lr = torch.zeros((), device=run.device)
        for optimizer in run.optimizers:
            for group in optimizer.param_groups:
                group |= {"lr": self._lr, "capturable": True}  # a fused one is, and has no such setting
            for state in optimizer.state.values():  # of a checkpoint
                state |= {name: value.to(run.device) for name, value in state.items()}
        self._warmed_up = 0
        self._stream = torch.cuda.Stream()
        self._graph: torch.cuda.CUDAGraph | None = None
        self._inputs: list[Tensor] = []
        self._recorded: Any = None
        self._loss_sum = self._norm = torch.empty(0)

    def __call__(self, run: Run, micro_batches: list[MicroBatch], counts: StepCounts) -> StepResult:
        """Take the step.

        Raises:
            UserError: the batch differs from the one that was recorded in more than the values of its tensors.
        """
        (batch,) = micro_batches
        lr = lr_at(run.progress.step, run.config.optim, *run.schedule)
        self._lr.fill_(lr)
        if batch.num_examples < run.config.global_batch_size:
            return self._train_step(run, micro_batches, counts)
        if self._warmed_up < WARM_UP_STEPS:
            return self._warm_up(run, micro_batches, counts)
        what_is_repeated = recursively_apply(lambda tensor: tensor.shape, batch.data), counts.targets
        if self._graph is None:
            self._recorded = what_is_repeated
            self._record(run, batch, counts)
            assert self._graph
        if what_is_repeated != self._recorded:
            raise UserError("cuda_graphs=true repeats one step, but this task's batches differ in shape: leave it out")

        torch._foreach_copy_(self._inputs, tensors_in(batch.data))
        self._graph.replay()
        run.progress.step += 1
        return StepResult(counts, lr, self._loss_sum.clone(), self._norm.clone())

    def _warm_up(self, run: Run, micro_batches: list[MicroBatch], counts: StepCounts) -> StepResult:
        """Take a step on the stream that is recorded next, as autograd runs backward where forward ran."""
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            result = self._train_step(run, micro_batches, counts)
        torch.cuda.current_stream().wait_stream(self._stream)
        self._warmed_up += result.grad_norm is not None  # else the optimizer may not have its state yet
        return result

    def _record(self, run: Run, batch: MicroBatch, counts: StepCounts) -> None:
        """Record the step of a batch of this shape. Nothing is computed, and the run stays where it is."""
        data = recursively_apply(torch.clone, batch.data)
        self._inputs = tensors_in(data)
        self._graph, step = torch.cuda.CUDAGraph(), run.progress.step
        # other threads, such as the one that writes a checkpoint, go on using the GPU
        with torch.cuda.graph(self._graph, stream=self._stream, capture_error_mode="thread_local"):
            result = self._train_step(run, [batch._replace(data=data)], counts)
        self._loss_sum, self._norm = result.loss_sum, result.norm
        run.progress.step = step


def tensors_in(data: Any) -> list[Tensor]:
    """Return the tensors in nested lists, tuples and dicts, in their order."""
    found: list[Tensor] = []
    recursively_apply(found.append, data)
    return found
