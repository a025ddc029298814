"""FSDP's two collectives on the CPU, without gloo's detours."""

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule


def shorten_collectives(model: nn.Module) -> None:
    """For each of the model's FSDP units, which are also gathered one ahead: no process then waits for a slower one
    that has not come to this unit yet."""
    gather: Any = GatherByBroadcast()  # torch's abstract classes for them are private
    scatter: Any = ReduceScatterInPairs()
    units = [module for module in model.modules() if isinstance(module, FSDPModule)]
    for unit in units:
        unit.set_custom_all_gather(gather)
        unit.set_custom_reduce_scatter(scatter)
        unit._set_unshard_async_op(True)  # else FSDP gathers ahead on CUDA streams only
    for unit, following in pairwise(units[1:]):
        unit.set_modules_to_forward_prefetch([following])


class _Buffers:
    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)


class GatherByBroadcast(_Buffers):
    """gloo's all_gather writes into a buffer of its own, and then copies. To broadcast each shard into its place takes
    half the time.
    """

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> dist.Work:
        """Collective; done on return, or with `async_op` when what it returns is.

        Args:
            output_tensor: shape (processes x shard,); the others' shards are written to it.
            input_tensor: this process's shard, which FSDP has put in its place in output_tensor.
        """
        places = output_tensor.view(torch.uint8).chunk(group.size())  # gloo does not know all dtypes
        assert places[group.rank()].data_ptr() == input_tensor.data_ptr()
        sent: list[Any] = [
            dist.broadcast(place, group=group, group_src=rank, async_op=True) for rank, place in enumerate(places)
        ]
        gathered = _All(sent)
        if not async_op:
            gathered.wait()
        return gathered


class _All(dist.Work):
    """Several, done when all are."""

    def __init__(self, works: list[Any]) -> None:
        super().__init__()
        self._works = works

    def wait(self, timeout: Any = None) -> bool:
        for work in self._works:
            work.wait()
        return True


class ReduceScatterInPairs(_Buffers):
    """gloo's reduce_scatter is an all_reduce of everything, of which each process keeps a part. To send each its part
    and to sum there takes less than half the time.
    """

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: dist.ReduceOp.RedOpType,
        async_op: bool = False,
    ) -> None:
        """Collective; done on return, whatever async_op says.

        Args:
            output_tensor: shape (shard,).
            input_tensor: shape (processes x shard,).
            op: SUM or AVG.
        """
        assert op in (dist.ReduceOp.SUM, dist.ReduceOp.AVG)
        parts, rank = input_tensor.chunk(group.size()), group.rank()
        others = [other for other in range(group.size()) if other != rank]
        received = {other: torch.empty_like(output_tensor) for other in others}
        exchanged: list[Any] = [dist.irecv(received[other], group=group, group_src=other) for other in others]
        exchanged += [dist.isend(parts[other], group=group, group_dst=other) for other in others]
        output_tensor.copy_(parts[rank])
        for work in exchanged:
            work.wait()
        for other in others:
            output_tensor.add_(received[other])
        if op == dist.ReduceOp.AVG:
            output_tensor.div_(group.size())
