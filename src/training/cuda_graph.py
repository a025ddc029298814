"""An optimizer step that is recorded once, as a CUDA graph, and then replayed: `cuda_graphs=true`.

A small model's step is a hundred kernels of microseconds each, and Python takes longer to launch them one by one than
the GPU to run them. A graph launches all of them at once: 0.17 ms of the host's time in place of 2.2 for the MNIST CNN
(docs/gpu.md). It repeats what was recorded, on the same memory: so a batch is copied to where the recorded one was, and
the learning rate is a tensor. torch moves the random number generator on by as much as the step drew, so that each
replay has dropout of its own, the same as without a graph.
https://docs.pytorch.org/docs/stable/notes/cuda.html#cuda-graphs
"""

from typing import Any

import torch
from accelerate.utils import recursively_apply
from torch import Tensor

from src.config.errors import UserError
from src.tasks.base import Counts
from src.training.batches import MicroBatch, TrainStep
from src.training.optim import lr_at
from src.training.progress import StepResult
from src.training.run import Run

WARM_UP_STEPS = 3
"""Steps before the one that is recorded, in which libraries choose algorithms and allocate their workspaces."""


class RecordedStep:
    """Take steps as `train_step` does: the first three by calling it, the others by replaying a recording of the
    fourth. An epoch's last batch, if it is smaller, goes through `train_step` too."""

    def __init__(self, run: Run, train_step: TrainStep) -> None:
        self._train_step = train_step
        self._lr = torch.zeros((), device=run.device)
        for optimizer in run.optimizers:
            for group in optimizer.param_groups:
                # a number would be repeated as it was when recorded; a fused optimizer ignores `capturable`
                group |= {"lr": self._lr, "capturable": True}
            # of a checkpoint: the step count of an optimizer that is not capturable is on the CPU
            for state in optimizer.state.values():
                state |= {name: value.to(run.device) for name, value in state.items()}
        self._warmed_up = 0
        self._stream = torch.cuda.Stream()
        self._graph = torch.cuda.CUDAGraph()
        self._recorded: Any = None

    def __call__(self, run: Run, micro_batches: list[MicroBatch], counts: Counts) -> StepResult:
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
        # the number of targets too: it is in the loss's factor, a Python number
        what_is_repeated = recursively_apply(lambda tensor: tensor.shape, batch.data), counts["targets"]
        if self._recorded is None:
            self._recorded = what_is_repeated
            self._record(run, batch, counts)
        if what_is_repeated != self._recorded:
            raise UserError("cuda_graphs=true repeats one step, but this task's batches differ in shape: leave it out")

        torch._foreach_copy_(self._inputs, tensors_in(batch.data))
        self._graph.replay()
        # the host's own counter, which no graph advances
        run.progress.step += 1
        # copies, as the next replay writes to the same memory before anybody has read them
        return StepResult(counts, lr, self._loss_sum.clone(), self._norm.clone())

    def _warm_up(self, run: Run, micro_batches: list[MicroBatch], counts: Counts) -> StepResult:
        """Take a step on the stream that is recorded next, as autograd runs backward where forward ran."""
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            result = self._train_step(run, micro_batches, counts)
        torch.cuda.current_stream().wait_stream(self._stream)
        # a skipped step doesn't count: the optimizer may not have its state yet
        self._warmed_up += result.grad_norm is not None
        return result

    def _record(self, run: Run, batch: MicroBatch, counts: Counts) -> None:
        """Record the step of a batch of this shape. Nothing is computed, and the run stays where it is."""
        # memory that lives as long as the graph, which reads its inputs from there
        data = recursively_apply(torch.clone, batch.data)
        self._inputs = tensors_in(data)
        step = run.progress.step
        # other threads, such as the one that writes a checkpoint, go on using the GPU
        with torch.cuda.graph(self._graph, stream=self._stream, capture_error_mode="thread_local"):
            result = self._train_step(run, [batch._replace(data=data)], counts)
        self._loss_sum, self._norm = result.loss_sum, result.norm
        # train_step has counted it, but its kernels were only recorded
        run.progress.step = step


def tensors_in(data: Any) -> list[Tensor]:
    """Return the tensors in nested lists, tuples and dicts, in their order."""
    found: list[Tensor] = []
    recursively_apply(found.append, data)
    return found
