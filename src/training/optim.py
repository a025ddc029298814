"""Optimizers by name, the learning rate as a function of the step, and the scaling of gradients."""

import math
from collections.abc import Iterable
from typing import NamedTuple

from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import SGD, Adadelta, AdamW, Muon, Optimizer

from src.config.config import Optim


class Schedule(NamedTuple):
    """What the learning rate depends on, besides its settings."""

    steps: int
    """Optimizer steps that it spans."""
    steps_per_epoch: int


def build_optimizers(config: Optim, model: nn.Module) -> list[Optimizer]:
    """Return one optimizer; for muon two: it takes the weight matrices except embeddings and the last layer, and adamw
    takes the rest, if any. Call it after FSDP has sharded the model."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    hidden: set[nn.Parameter] = set()
    if config.name == "muon":
        ends = {m.weight for m in model.modules() if isinstance(m, nn.Embedding)}
        ends.update([m.weight for m in model.modules() if isinstance(m, nn.Linear)][-1:])
        hidden = {p for p in parameters if p.ndim == 2 and min(p.shape) > 1 and p not in ends}
    rest = [p for p in parameters if p not in hidden]
    matrices = {"params": [p for p in rest if p.ndim >= 2], "weight_decay": config.weight_decay}
    vectors = {"params": [p for p in rest if p.ndim < 2], "weight_decay": 0.0}
    groups = [group for group in (matrices, vectors) if group["params"]]
    match config.name:
        case "sgd":
            is_sharded = any(isinstance(p, DTensor) for p in parameters)
            return [SGD(groups, lr=config.lr, momentum=config.momentum, fused=not is_sharded)]
        case "adadelta":
            return [Adadelta(groups, lr=config.lr)]
        case "adamw" | "muon":
            optimizers: list[Optimizer] = []
            if hidden:
                muon = Muon(
                    [p for p in parameters if p in hidden],
                    lr=config.lr,
                    weight_decay=config.weight_decay,
                    momentum=config.momentum,
                    adjust_lr_fn="match_rms_adamw",  # updates of adamw's size, so that both share one learning rate
                )
                optimizers.append(muon)
            if groups:
                optimizers.append(AdamW(groups, lr=config.lr, betas=config.betas, fused=True))
            return optimizers


def lr_at(step: int, config: Optim, schedule_steps: int, steps_per_epoch: int) -> float:
    """Return the learning rate of optimizer step `step`, counted from 0.

    constant: the peak; linear, cosine: from the peak to final_lr_ratio of it; step: times decay_factor every
    decay_epochs epochs (torch's StepLR); one_cycle: cosine up from a 25th of the peak, cosine down (Smith & Topin 2018,
    https://arxiv.org/abs/1708.07120, as torch's OneCycleLR). All but one_cycle warm up linearly.
    """
    warmup = round(config.warmup_steps * schedule_steps) if config.warmup_steps < 1 else config.warmup_steps
    if step < warmup:
        rise = (step + 1) / warmup
        return config.lr * (_cosine(1 / 25, 1, rise) if config.schedule == "one_cycle" else rise)
    progress = (step - warmup) / max(1, schedule_steps - warmup)
    match config.schedule:
        case "constant":
            return config.lr
        case "linear":
            return config.lr * (1 + (config.final_lr_ratio - 1) * progress)
        case "cosine" | "one_cycle":
            return config.lr * _cosine(1, config.final_lr_ratio, progress)
        case "step":
            return config.lr * config.decay_factor ** math.floor(step / steps_per_epoch / config.decay_epochs + 1e-9)


def set_lr(optimizers: Iterable[Optimizer], lr: float) -> None:
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            if not isinstance(
                group["lr"], Tensor
            ):  # src/training/cuda_graph.py sets a tensor: a graph would repeat this value
                group["lr"] = lr


def _cosine(start: float, end: float, progress: float) -> float:
    return end + (start - end) * (1 + math.cos(math.pi * progress)) / 2
