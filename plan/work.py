"""Count the work of a step: the operations, memory traffic and communication of its operators."""

from collections import defaultdict
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup, get_process_group_ranks
from torch.distributed.distributed_c10d import _resolve_process_group
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from src.training.gradients import to_local

IDLE = ("prim::", "empty", "detach", "view", "wait_tensor", "_wrap_tensor")
"""Parts of the names of operators that cost a device nothing."""


class Work(TorchDispatchMode):
    """A context that counts the work of all operators on a device, including the backward pass, DDP and FSDP.

    `counts` has, by name: `product flops DTYPE` of matrix products and convolutions, and `attention flops DTYPE`;
    `bytes` that all other operators read and write; `copied` bytes to or from the host's memory; `sent PLACE` bytes of
    this process and `collectives PLACE`, where PLACE is `within` a machine or, for groups that span several machines,
    `between` them, through this process's network card; and, counted a second time, all-to-alls, which attention
    waits for: `awaited sent PLACE` and `awaited collectives PLACE`.
    """

    def __init__(self, device: str, per_machine: int) -> None:
        super().__init__()
        self.counts: dict[str, float] = defaultdict(int)
        self._device, self._per_machine = device, per_machine

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = function(*args, **kwargs)
        leaves = tree_leaves((args, kwargs, result))
        anywhere = [to_local(leaf) for leaf in leaves if isinstance(leaf, Tensor)]
        tensors = [tensor for tensor in anywhere if tensor.device.type == self._device]
        name = function._schema.name
        if not tensors or function.is_view or any(word in name for word in IDLE):
            return result
        if "copy" in name and len(tensors) < len(anywhere):
            self.counts["copied"] += tensors[-1].nbytes
        given = dict(zip([argument.name for argument in function._schema.arguments], args, strict=False), **kwargs)
        if "c10d" in name:
            self._count_collective(name, max(tensor.nbytes for tensor in tensors), _ranks(given))
        elif formula := flop_registry.get(function._overloadpacket):
            # torch 2.11 mistakes the dtype of a product's output for its shape
            readable = [value for value in args if not isinstance(value, torch.dtype)]
            # the formula subtracts the offsets of packed documents, int32, which the null GPU cannot
            readable = [value.cpu() if getattr(value, "dtype", None) == torch.int32 else value for value in readable]
            flops = formula(*readable, **kwargs, out_val=result)
            if given.get("is_causal"):
                flops /= 2  # torch counts all pairs of tokens
            # factors in half precision may be summed in fp32
            dtype = min((tensor.dtype for tensor in tensors if tensor.ndim > 1), key=lambda dtype: dtype.itemsize)
            kind = "attention" if "att" in name else "product"
            self.counts[f"{kind} flops {str(dtype).removeprefix('torch.')}"] += flops
        elif name == "aten::embedding":  # reads a few rows of its table
            self.counts["bytes"] += 2 * tensors[-1].nbytes
        else:
            self.counts["bytes"] += sum(tensor.nbytes for tensor in tensors)
        return result

    def _count_collective(self, name: str, size: int, ranks: list[int]) -> None:
        """Count a collective whose largest tensor has `size` bytes, as NCCL's ring algorithms send it."""
        rounds = 2 if "allreduce" in name else 1  # reduce-scatter, then all-gather
        sent = rounds * size * (len(ranks) - 1) / len(ranks)
        place, machines = "within", len({rank // self._per_machine for rank in ranks})
        if machines > 1:  # one ring per network card of a machine, each with its part of the data
            place, sent = "between", sent / (len(ranks) / machines)
        for kind in ("", "awaited ") if "all_to_all" in name else ("",):
            self.counts[f"{kind}sent {place}"] += sent
            self.counts[f"{kind}collectives {place}"] += 1


def _ranks(given: dict[str, Any]) -> list[int]:
    """Return the ranks in a collective's group: an argument of the collective, or for functional ones its name."""
    if "process_group" in given:
        return get_process_group_ranks(ProcessGroup.unbox(given["process_group"]))
    return get_process_group_ranks(_resolve_process_group(given["group_name"]))
