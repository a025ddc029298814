"""The norms of gradients and parameters, block by block, in the records: train/grad_norm/… and train/param_norm/…."""

import math
from typing import Any

import torch
from torch import Tensor, nn

from src.distributed import grad_square_sum, num_replicas
from src.optim import local_gradients, to_local
from src.progress import StepResult
from src.run import Run


class Norms:
    """Measures the steps that are recorded, right before the weights are updated."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._squares: Tensor | None = None
        self._parts: dict[str, list[nn.Parameter]] = {}
        """The trained parameters of each block, and of each module outside."""
        if not run.config.log_norms:
            return
        model = run.accelerator.unwrap_model(run.model)
        kinds = getattr(model, "_no_split_modules", None) or []  # FSDP changes the names of classes
        blocks = [name for name, m in model.named_modules() if type(m).__name__.removeprefix("FSDP") in kinds]
        for name, parameter in model.named_parameters():
            if parameter.requires_grad:
                part = next((block for block in blocks if name.startswith(f"{block}.")), name.rpartition(".")[0])
                self._parts.setdefault(part, []).append(parameter)
        run.optimizers[0].register_step_pre_hook(self._measure)  # before the others' steps, too

    def metrics(self, result: StepResult) -> dict[str, float]:
        """Return the L2 norms of this step's gradients before clipping, and of the parameters that they were taken of;
        none if it was skipped or is not recorded. Collective; waits for the device."""
        squares, self._squares, norm = self._squares, None, result.grad_norm
        if squares is None or norm is None:
            return {}
        accelerator, max_norm = self._run.accelerator, self._run.config.optim.max_grad_norm or math.inf
        if accelerator.is_fsdp2:
            squares = accelerator.reduce(squares.to(accelerator.device), "sum") / num_replicas(accelerator)
        gradients, parameters = squares.sqrt().view(2, -1)
        gradients /= min(max_norm / (norm + 1e-6), 1.0)  # as scale_and_clip_ has multiplied them
        names = [f"train/{kind}/{part}" for kind in ("grad_norm", "param_norm") for part in self._parts]
        return dict(zip(names, [*gradients.tolist(), *parameters.tolist()], strict=True))

    def _measure(self, *_: Any) -> None:
        step = self._run.progress.step + 1
        if step % self._run.config.log_every and step != self._run.total_steps:
            return
        parts = self._parts.values()
        parameters = [[to_local(parameter.detach()) for parameter in part] for part in parts]
        # the loss may not depend on some of the parameters
        gradients = [local_gradients(part) or [to_local(part[0].detach()).new_zeros(1)] for part in parts]
        self._squares = torch.stack([grad_square_sum(tensors) for tensors in gradients + parameters])
