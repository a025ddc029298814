"""What only training on a CPU gains from: on a GPU nothing here is used, and without it a CPU is merely slower."""

from torch import nn

from src.training.cpu import mkl
from src.training.cpu.dropout import Dropout
from src.training.cpu.malloc import GIVE_BACK, KEEP, mallopt


def tune_for_cpu(model: nn.Module, precision: str, is_sharded: bool = False) -> list[str]:
    """Speed up this process and `model`, in place: its layers change their class, but keep their names and weights.

    Args:
        precision: fp32, bf16, fp16 or fp8.
        is_sharded: whether FSDP shards it, as memory is then worth more than time.

    Returns:
        What was done, for the start-up summary.
    """
    done = []
    # Keeping freed memory spares a step of the MNIST CNN 6,000 page faults, a quarter to a third of its time
    # (docs/figures.md). Under FSDP, what was gathered would pile up.
    if mallopt(GIVE_BACK if is_sharded else KEEP):
        done.append(f"freed memory is {'given back' if is_sharded else 'kept'}")
    _change_class(model, nn.Dropout, Dropout)
    # a step of a Llama of 10.8M takes 0.53 s in place of 0.87 (Zen 5)
    if precision == "fp32" and mkl.is_slow() and _change_class(model, nn.Linear, mkl.Linear):
        done.append("oneDNN in place of MKL")
    return done


def _change_class(model: nn.Module, old: type[nn.Module], new: type[nn.Module]) -> bool:
    """Turn the layers whose class is exactly `old` into `new`. Return whether there were any."""
    # Their class is replaced, as fully_shard does it, not the layers: hooks and tied weights stay. Subclasses are left
    # alone, as their forward may differ.
    layers = [module for module in model.modules() if type(module) is old]
    for layer in layers:
        layer.__class__ = new
    return bool(layers)
