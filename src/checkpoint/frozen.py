"""Frozen parameters are in no checkpoint: how it is known that they are the same."""

import math
from pathlib import Path

import torch
from torch import nn

from src.process import UserError


def frozen_norm(model: nn.Module) -> float:
    """The L2 norm over all frozen parameters, by which they are known again; 0 where there are none. Before FSDP."""
    norms = [p.detach().norm(dtype=torch.float32) for p in model.parameters() if not p.requires_grad]
    return torch.stack(norms).double().norm().item() if norms else 0.0


def require_same_frozen(checkpoint: Path, saved_norm: float, norm: float) -> None:
    """Raises: ValueError: the frozen parameters are not those that the checkpoint's were trained beside."""
    if not math.isclose(saved_norm, norm, rel_tol=1e-6):
        raise UserError(
            f"{checkpoint} was trained beside other frozen weights: their norm was {saved_norm:.8g} and is {norm:.8g}; "
            f"task.model has changed since, give the one of then (task.revision)"
        )
