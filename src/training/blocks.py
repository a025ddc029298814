"""The repeating blocks of a model: what is sharded, recomputed and compiled one by one."""

from torch import nn


def repeating_blocks(model: nn.Module) -> list[nn.Module]:
    """Return the modules of the classes in the model's `_no_split_modules`; none if it has no such list."""
    names = getattr(model, "_no_split_modules", None) or []
    return [module for module in model.modules() if type(module).__name__ in names]
