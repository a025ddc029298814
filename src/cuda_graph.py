"""A model's forward and backward pass as one CUDA graph each: for models so small that the CPU can't keep up."""

from __future__ import annotations

from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import send_to_device
from torch import Tensor, nn

from src.process import UserError
from src.data.loading import fetch
from src.config import Config
from src.tasks.base import Examples


def capture(accelerator: Accelerator, config: Config, model: nn.Module, train_set: Examples) -> None:
    """Records, in place, the kernels that training launches on a whole micro-batch, and from then on launches them all
    at once; smaller batches, and evaluation, go the usual way. Random numbers are drawn anew by each replay.

    Args:
        model: before `prepare`.

    Raises:
        ValueError: this run can have no graph.
    """
    if accelerator.device.type != "cuda" or accelerator.use_distributed or accelerator.is_fsdp2:
        raise UserError("cuda_graphs=true is for one process on one NVIDIA GPU: take single_gpu.yaml, or leave it out")
    if config.activation_checkpointing or config.compile:
        raise UserError("cuda_graphs=true: leave out activation_checkpointing and compile")
    if config.accumulation(1) > 1:  # a graph writes each micro-batch's gradients to where the last one's are
        raise UserError("cuda_graphs=true cannot accumulate gradients: leave micro_batch_size out")
    batch = fetch(config.task, train_set, list(range(min(config.micro_batch(1), len(train_set)))))
    example = config.task.model_input(send_to_device(batch, accelerator.device))
    if example is None:
        raise UserError(f"cuda_graphs=true: the task {config.task.name} has no model_input, which says what to record")
    model.to(accelerator.device)
    usual = model.forward
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(accelerator.mixed_precision)
    # the graph holds the casts of the weights: a cache of them would be of the weights as they are now
    with torch.autocast("cuda", dtype, enabled=dtype is not None, cache_enabled=False):
        graphed: Any = torch.cuda.make_graphed_callables(model, (example,))
    recorded = graphed.forward

    def forward(inputs: Tensor) -> Tensor:
        return recorded(inputs) if inputs.shape == example.shape and torch.is_grad_enabled() else usual(inputs)

    model.forward = forward
