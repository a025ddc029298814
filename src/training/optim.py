"""Build optimizers by name, and compute the learning rate as a function of the step."""

import math
from collections.abc import Callable
from typing import Any

import torch._dynamo  # noqa: F401  # each optimizer imports it, but would do so later, while garbage is looked for
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import SGD, Adadelta, AdamW, Optimizer

from src.config.config import Config
from src.config.groups import Optim
from src.training.ema import with_average
from src.training.muon import build_muon
from src.training.rates import with_scales

OPTIMIZERS: dict[str, Callable[[Optim, nn.Module], list[Optimizer]]] = {
    # by names in the settings, functions that build optimizers of some parameters: adamw gets the others
    "muon": build_muon,
}
EXTENSIONS: list[Callable[[Config, nn.Module, list[Any]], list[Any]]] = [
    # functions that give parts of the model a rate of their own, or add what averages its weights after each step
    with_scales,
    with_average,
]


def build_optimizers(config: Optim, model: nn.Module) -> list[Optimizer]:
    """Return the optimizers of a model's trained parameters, each of which has one. Call it after FSDP has sharded the
    model: optimizers hold references to the parameters, which sharding replaces."""
    optimizers = OPTIMIZERS[config.name](config, model) if config.name in OPTIMIZERS else []
    taken = {p for optimizer in optimizers for group in optimizer.param_groups for p in group["params"]}
    rest = [p for p in model.parameters() if p.requires_grad and p not in taken]

    # no weight decay for biases and the scales of norms, for which zero is not a natural value
    matrices = {"params": [p for p in rest if p.ndim >= 2], "weight_decay": config.weight_decay}
    vectors = {"params": [p for p in rest if p.ndim < 2], "weight_decay": 0.0}
    # torch refuses empty groups
    groups: list[dict[str, Any]] = [g for g in (matrices, vectors) if g["params"]]

    # Optimizers don't go through Accelerate's `prepare`: its wrapper costs 116 µs per step, for loss scaling and
    # gradient accumulation, which train_step handles itself.
    match config.name if groups else None:
        case "sgd":
            # torch's fused SGD takes no DTensors: the host then waits for each step's norm, as for adadelta
            is_sharded = any(isinstance(p, DTensor) for p in rest)
            optimizers = [SGD(groups, lr=config.lr, momentum=config.momentum, fused=not is_sharded)]
        case "adadelta":
            optimizers = [Adadelta(groups, lr=config.lr)]
        case "adamw" | "muon":
            # fused: one kernel for all parameters, which can skip a step by itself
            optimizers.append(AdamW(groups, lr=config.lr, betas=config.betas, fused=True))
    return optimizers


def extended(config: Config, model: nn.Module, optimizers: list[Any]) -> list[Any]:
    """Return a model's optimizers, if there are any, with what the settings add."""
    for extend in EXTENSIONS:
        optimizers = extend(config, model, optimizers)
    return optimizers


def lr_at(step: int, config: Optim, schedule_steps: int, steps_per_epoch: int) -> float:
    """Return the learning rate of optimizer step `step`, counted from 0, in a schedule that spans `schedule_steps`.

    constant: stay at the peak. linear, cosine: fall from the peak to final_lr_ratio of it. step: multiply by
    decay_factor every decay_epochs epochs (torch's StepLR). one_cycle: rise from a 25th of the peak and fall, both as a
    cosine (Smith & Topin 2018, https://arxiv.org/abs/1708.07120; torch's OneCycleLR). wsd: stay at the peak until the
    last decay_steps, then fall as a cosine to final_lr_ratio of it (Hu et al. 2024, https://arxiv.org/abs/2404.06395;
    transformers' get_wsd_schedule). All but one_cycle warm up linearly.
    """
    # A function of the step instead of a scheduler: it has no state to save and can't be stepped too often. (Accelerate
    # steps a prepared scheduler num_processes times per step: accelerate#2318.)
    warmup = config.warmup_steps
    if warmup < 1:
        # a fraction of the schedule
        warmup = round(warmup * schedule_steps)
    if step < warmup:
        # step + 1: a learning rate of 0 would waste the first step
        rise = (step + 1) / warmup
        if config.schedule == "one_cycle":
            rise = _cosine(1 / 25, 1, rise)
        return config.lr * rise

    progress = (step - warmup) / max(1, schedule_steps - warmup)
    match config.schedule:
        case "constant":
            return config.lr
        case "linear":
            return config.lr * (1 + (config.final_lr_ratio - 1) * progress)
        case "cosine" | "one_cycle":
            return config.lr * _cosine(1, config.final_lr_ratio, progress)
        case "step":
            # 1e-9: a quotient that should be whole may be rounded down
            decays = math.floor(step / steps_per_epoch / config.decay_epochs + 1e-9)
            return config.lr * config.decay_factor**decays
        case "wsd":
            decay = config.decay_steps
            if decay < 1:
                decay = round(decay * schedule_steps)
            left = (schedule_steps - step) / max(1, decay)
            return config.lr * _cosine(config.final_lr_ratio, 1, min(1, left))


def set_lr(optimizers: list[Optimizer], lr: float) -> None:
    """Set the learning rate of all parameter groups, each times its own factor."""
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            # a tensor is set by whoever put it there: a captured step would repeat a float
            if not isinstance(group["lr"], Tensor):
                group["lr"] = lr * group.get("lr_scale", 1.0)


def _cosine(start: float, end: float, progress: float) -> float:
    return end + (start - end) * (1 + math.cos(math.pi * progress)) / 2
