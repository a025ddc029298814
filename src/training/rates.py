"""Learning rates per part of a model, and frozen parts: `optim.groups` and `optim.layer_decay`."""

import re
from collections import Counter

from accelerate.utils import extract_model_from_parallel
from torch import nn
from torch.optim import Optimizer

from src.config.config import Config
from src.config.errors import raise_if_any
from src.config.rates import ParameterGroup

REST = ParameterGroup(match=re.compile(".*"))


def freeze(model: nn.Module, config: Config) -> list[str]:
    """Freeze parts of a model that the task has just built, and keep on it the factors of the others' learning rates,
    for `with_scales`. Return how many weights have which peak rate, a line for each group.

    Raises:
        UserError: a group has no parameters, none is left to train, or the model names no blocks.
    """
    optim, lines, mistakes = config.optim, [], []
    if not (optim.groups or optim.layer_decay):
        return []
    scales = layer_scales(model, optim.layer_decay or 1.0)
    if optim.layer_decay and len({*scales.values()}) == 1:
        mistakes.append(f"optim.layer_decay: {type(model).__name__} names no repeating blocks in _no_split_modules")
    left = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    for group in (*optim.groups, REST):
        pattern, sizes = group.match, Counter[str]()
        for name in filter(pattern.fullmatch, [*left]):
            parameter = left.pop(name)
            parameter.requires_grad = not group.frozen
            scales[name] *= group.lr_scale
            sizes["frozen" if group.frozen else f"at {optim.lr * scales[name]:.3g}"] += parameter.numel()
        if not sizes and group is not REST:
            mistakes.append(f"optim.groups: {pattern.pattern} matches no parameter left; one is {[*scales][-1]}")
        lines += [f"{pattern.pattern}: {size:,} weights {rate}" for rate, size in sizes.items()]
    if not any(parameter.requires_grad for parameter in model.parameters()):
        mistakes.append("optim.groups: all parameters are frozen")
    raise_if_any(mistakes)
    model.lr_scales = scales  # type: ignore[assignment]
    return lines


def layer_scales(model: nn.Module, decay: float) -> dict[str, float]:
    """Return the factor of each parameter's learning rate, by name: `decay` to the power of the number of blocks that
    come after its own. What comes before the first block, such as the embeddings, counts as one more.

    Layer-wise decay as in BEiT (Bao et al. 2021, https://arxiv.org/abs/2106.08254).
    """
    kinds = getattr(model, "_no_split_modules", None) or []
    blocks = [f"{name}." for name, module in model.named_modules() if type(module).__name__ in kinds]
    depths, seen = {}, {""}
    for name, _ in model.named_parameters():
        # the outermost, if blocks are in each other
        seen.add(next(filter(name.startswith, blocks), ""))
        depths[name] = len(seen)
    return {name: decay ** (len(seen) - depth) for name, depth in depths.items()}


def with_scales(_: Config, model: nn.Module, optimizers: list[Optimizer]) -> list[Optimizer]:
    """Split the optimizers' groups of parameters by the factors of learning rates that `freeze` has kept."""
    unwrapped = extract_model_from_parallel(model)
    # by name, as FSDP replaces the parameters
    names = {parameter: name for name, parameter in unwrapped.named_parameters()}
    scales = getattr(unwrapped, "lr_scales", {})
    for optimizer in optimizers if scales else ():
        optimizer.param_groups[:] = [
            group | {"params": part, "lr": group["lr"] * scale, "lr_scale": scale}
            for group in optimizer.param_groups
            for scale in dict.fromkeys(scales.values())
            if (part := [parameter for parameter in group["params"] if scales[names[parameter]] == scale])
        ]
    return optimizers
