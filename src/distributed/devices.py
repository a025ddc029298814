"""What suits a kind of device: done to a model before it is wrapped or sharded."""

from collections.abc import Callable

from torch import nn

from src.distributed.cpu import tune_for_cpu

TUNERS: dict[str, Callable[[nn.Module, bool], list[str]]] = {
    # they are told whether FSDP will shard the model, and return what was done
    "cpu": tune_for_cpu,  # room: cpu
}
"""By torch's name for the device."""
