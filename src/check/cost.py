"""Check 9, Cost: what one step really sends, and the time that it takes."""

import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from src.check.findings import Row, finding, gather
from src.check.reference import backward
from src.check.start import largest_shard
from src.check.subject import Subject, num_bytes
from src.distributed.accelerator import num_replicas
from src.training.run import Run

ROUNDS = 3
"""Steps to take the median time of."""
SHARE, SLACK = 0.01, 1000.0
"""What the bytes may be off by, as a share, and in bytes, for the loop's own counts."""
OTHER_TRAFFIC = (
    "not what the strategy has to send: gradients reduced after each micro-batch, or not at all, a strategy other than "
    "it seems, or a model that communicates by itself"
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
        space, _, name = function._schema.name.partition("::")
        if "c10d" not in space or self.is_done or "wait" in name or "barrier" in name:
            return result
        # what is gathered or scattered is the whole tensor: the larger of what goes in and what comes out
        sides = [[leaf for leaf in tree_leaves(side) if isinstance(leaf, Tensor)] for side in (*args[:2], result)]
        size = max(map(num_bytes, sides))
        by_name = {argument.name: value for argument, value in zip(function._schema.arguments, args, strict=False)}
        members = ProcessGroup.unbox(by_name["process_group"]).size()
        times = 2 if "allreduce" in name.replace("_", "") else 1
        self.sent += (members - 1) / members * size * times
        return result


def check_cost(subject: Subject) -> Iterator[Row]:
    """Examine the first step of the epoch, then time steps."""
    run, steps = subject.run, subject.micro_batches(0)
    micro_batches = next(steps)
    recorder = Recorder()
    hook = run.optimizers[0].register_step_pre_hook(recorder.finish)
    with recorder:
        subject.step(subject.at(0), micro_batches)
    hook.remove()
    least, most, formula = expected_bytes(subject, len(micro_batches))
    sent = max(gather(recorder.sent))
    is_within = least * (1 - SHARE) - SLACK <= sent <= most * (1 + SHARE) + SLACK
    expected = f"{most / 1e6:,.3f}" if least == most else f"{least / 1e6:,.3f} to {most / 1e6:,.3f}"
    measured = f"{sent / 1e6:,.3f} MB"
    yield finding("sent per step and process", measured, f"{expected} MB, {formula}", is_within, OTHER_TRAFFIC)

    def compute() -> None:
        backward(run.task, subject.reference, [batch.data for batch in micro_batches])
        for optimizer in subject.reference_optimizers:
            optimizer.step()
            optimizer.zero_grad()

    data = median_ms(run, lambda: next(steps))
    step = median_ms(run, lambda: subject.step(subject.at(0), micro_batches))
    alone = median_ms(run, compute)
    measured = f"{data + step:,.1f} ms: data {data:,.1f}, compute {alone:,.1f} (by an unwrapped, eager copy), "
    yield finding("time per step", f"{measured}communication, waiting, the rest {max(0.0, step - alone):,.1f}")


def expected_bytes(subject: Subject, num_micro_batches: int) -> tuple[float, float, str]:
    """Return the least and most bytes that a process sends in a step, and the formula.

    In a ring of N processes an all_reduce of S bytes sends 2 (N - 1) / N S; a reduce_scatter to shards, or an
    all_gather of them, half of that (Rajbhandari et al. 2020, https://arxiv.org/abs/1910.02054, section 7). FSDP need
    not gather again, or reduce, what is outside of its blocks, frozen or without a gradient: at least, it gathers all
    once. HSDP does all that among the processes that share a replica, then an all_reduce of each reduced shard over the
    replicas.
    """
    run, model = subject.run, subject.reference
    if run.world_size == 1:
        return 0.0, 0.0, "nothing"
    if not subject.is_fsdp:
        hook, buffers = run.launch.comm_hook, num_bytes(model.buffers())
        reduced = float(num_bytes(p for p in model.parameters() if p.requires_grad))
        formula = "all_reduce of the gradients"
        if hook:
            reduced /= 2
            formula += f" in {hook}"
        if buffers:
            formula += ", broadcast of the buffers"
        sent = (run.world_size - 1) / run.world_size * (2 * reduced + buffers)
        return sent, sent, formula
    replicas = num_replicas(run.accelerator)
    num_shards = run.world_size // replicas
    shards = {p: 4 * largest_shard(p, num_shards) for p in model.parameters()}
    gathers = float(num_micro_batches * (num_shards - 1) * sum(shards.values()))
    most, times = gathers, num_micro_batches
    if run.accelerator.state.fsdp_plugin.reshard_after_forward:
        most, times = 2 * gathers, 2 * num_micro_batches
    reductions = num_micro_batches if run.config.fsdp_reduce_each_micro_batch else 1
    formula = f"{times} all_gather + {reductions} reduce_scatter of each parameter"
    trained = reductions * sum(size for p, size in shards.items() if p.requires_grad)
    most += trained * (num_shards - 1)
    if replicas > 1:
        most += trained * 2 * (replicas - 1) / replicas
        formula += f" among {num_shards}, all_reduce of each shard over {replicas} replicas"
    return gathers, most, formula


def median_ms(run: Run, work: Callable[[], object]) -> float:
    """Return the time that a call takes, in ms: the median of a few, on the slowest process. Collective."""
    seconds = []
    for _ in range(ROUNDS):
        run.accelerator.wait_for_everyone()
        started = time.perf_counter()
        work()
        if run.device.type != "cpu":
            torch.accelerator.synchronize()
        seconds.append(time.perf_counter() - started)
    return 1000 * max(gather(statistics.median(seconds)))
