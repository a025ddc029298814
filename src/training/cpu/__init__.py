"""What only training on a CPU gains from: on a GPU nothing here is used, and without it a CPU is merely slower."""

from torch import nn

from src.training.cpu.dropout import Dropout
from src.training.cpu.malloc import GIVE_BACK, KEEP, mallopt


def tune_for_cpu(model: nn.Module, is_sharded: bool = False) -> list[str]:
    """Speed up this process and `model`, in place: its layers change their class, but keep their names. Return what was
    done, for the start-up summary. `is_sharded`: whether FSDP shards it, as memory is then worth more than time."""
    done = []
    # Keeping freed memory spares a step of the MNIST CNN 6,000 page faults, a quarter to a third of its time
    # (docs/figures.md). Under FSDP, what was gathered would pile up.
    if mallopt(GIVE_BACK if is_sharded else KEEP):
        done.append(f"freed memory is {'given back' if is_sharded else 'kept'}")
    # Their class is replaced, as fully_shard does it, not the layers: hooks stay. Subclasses are left alone, as their
    # forward may differ.
    for layer in model.modules():
        if type(layer) is nn.Dropout:
            layer.__class__ = Dropout
    return done
