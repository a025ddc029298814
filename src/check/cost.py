"""Cost: what one step really sends."""

import math
from collections.abc import Iterable, Iterator
from typing import Any

from torch import Tensor
from torch.distributed import ProcessGroup
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from src.check.findings import Row, finding
from src.check.subject import Subject
from src.distributed.accelerator import num_replicas

SHARE, SLACK = 0.01, 1000.0
"""What the bytes may be off by, as a share, and in bytes, for the loop's own counts."""
OTHER_TRAFFIC = (
    "not what the strategy has to send: gradients reduced after each micro-batch, or not at all, a strategy other than "
    "it seems, parameters that are not sharded, or a model that communicates by itself"
)


class Recorder(TorchDispatchMode):
    """Records the collectives of a step up to its update, including those of the backward pass, DDP and FSDP. What the
    optimizer sends (Muon does) is its own affair."""

    sent = 0.0
    """Bytes that this process sends, where each collective goes around a ring."""
    is_done = False

    def finish(self, *_: Any) -> None:
        """Record nothing from here on."""
        self.is_done = True

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        name = function._schema.name
        if "c10d" not in name or self.is_done or "wait" in name or "barrier" in name:
            return result
        # what is gathered or scattered is the whole tensor: the larger of what goes in and what comes out
        size = max(
            num_bytes(leaf for leaf in tree_leaves(side) if isinstance(leaf, Tensor)) for side in (*args[:2], result)
        )
        by_name = {argument.name: value for argument, value in zip(function._schema.arguments, args, strict=False)}
        members = ProcessGroup.unbox(by_name["process_group"]).size()
        times = 2 if "allreduce" in name.replace("_", "") else 1
        self.sent += (members - 1) / members * size * times
        return result


def check_cost(subject: Subject) -> Iterator[Row]:
    """Examine the first step of the epoch."""
    micro_batches = next(subject.micro_batches(0))
    recorder = Recorder()
    hook = subject.run.optimizers[0].register_step_pre_hook(recorder.finish)
    with recorder:
        subject.step(subject.at(0), micro_batches)
    hook.remove()
    least, most = expected_bytes(subject, len(micro_batches))
    is_within = least * (1 - SHARE) - SLACK <= recorder.sent <= most * (1 + SHARE) + SLACK
    expected = f"{least / 1e6:,.3f} to {most / 1e6:,.3f} MB"
    yield finding("sent per step and process", f"{recorder.sent / 1e6:,.3f} MB", expected, is_within, OTHER_TRAFFIC)


def expected_bytes(subject: Subject, num_micro_batches: int) -> tuple[float, float]:
    """Return the least and most bytes that a process sends in a step.

    In a ring of N processes an all_reduce of S bytes sends 2 (N - 1) / N S; a reduce_scatter to shards, or an
    all_gather of them, half of that (Rajbhandari et al. 2020, https://arxiv.org/abs/1910.02054, section 7). FSDP need
    not gather again, or reduce, what is outside of its blocks, frozen or without a gradient: at least, it gathers all
    once. HSDP does all that among the processes that share a replica, then an all_reduce of each reduced shard over the
    replicas.
    """
    run, model = subject.run, subject.reference
    if not run.accelerator.is_fsdp2:
        reduced = num_bytes(p for p in model.parameters() if p.requires_grad) / (2 if run.launch.comm_hook else 1)
        sent = (run.world_size - 1) / run.world_size * (2 * reduced + num_bytes(model.buffers()))
        return sent, sent
    replicas = num_replicas(run.accelerator)
    num_shards = run.world_size // replicas
    shards = {p: 4 * largest_shard(p, num_shards) for p in model.parameters()}
    gathers = num_micro_batches * (num_shards - 1) * sum(shards.values())
    times = 2 if run.accelerator.state.fsdp_plugin.reshard_after_forward else 1
    reductions = num_micro_batches if run.config.fsdp_reduce_each_micro_batch else 1
    trained = reductions * sum(size for p, size in shards.items() if p.requires_grad)
    return gathers, times * gathers + trained * (num_shards - 1 + 2 * (replicas - 1) / replicas)


def largest_shard(parameter: Tensor, world_size: int) -> int:
    """Return the elements of the first process's shard: FSDP divides the first dimension, and pads the other shards."""
    return math.ceil(parameter.shape[0] / world_size) * parameter[0].numel() if parameter.ndim else 1


def num_bytes(tensors: Iterable[Tensor]) -> int:
    """Return the bytes that the tensors take together."""
    return sum(tensor.nbytes for tensor in tensors)
