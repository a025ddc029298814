"""Remarks on what a strategy cannot do well, for the start-up summary."""

from collections.abc import Iterator

from accelerate import Accelerator
from torch import nn

from src.distributed.accelerator import BLOCKS, sharded_units

BATCH_NORMS = nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d


def strategy_remarks(accelerator: Accelerator, model: nn.Module) -> Iterator[str]:
    """Yield a line for whatever in the prepared model its strategy cannot do well."""
    if accelerator.is_fsdp2:
        _, *units = sharded_units(model)
        in_units = {weight for unit in units for weight in unit.parameters()}
        in_root = sum(weight.nbytes for weight in {*model.parameters()} - in_units)
        largest = max((sum(weight.nbytes for weight in unit.parameters()) for unit in units), default=0)
        if in_root > largest:
            share = f"{in_root / 1e6:,.1f} of {sum(weight.nbytes for weight in model.parameters()) / 1e6:,.1f} MB"
            yield f"FSDP gathers {share} of weights at once, more than any block has: name more modules in {BLOCKS}"
    # put into training mode, as steps will: a norm that is frozen stays as it is
    if accelerator.use_distributed and any(isinstance(m, BATCH_NORMS) and m.training for m in model.train().modules()):
        yield (
            "BatchNorm normalizes over the examples of its own process, so the curve depends on the number of "
            "processes: use GroupNorm, LayerNorm or torchvision's FrozenBatchNorm2d instead"
        )
