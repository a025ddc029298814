"""Check 9, Cost: what one step really sends, and the time and memory that it takes."""

import gc
import statistics
import time
from collections.abc import Callable, Collection, Iterable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from src.check.findings import Row, finding, gather
from src.check.reference import backward
from src.check.start import blocks_to_wrap, largest_shard
from src.check.subject import Subject
from src.distributed.accelerator import num_replicas, peak_memory
from src.training.run import Run

ROUNDS = 3
"""Steps to take the median time of."""
SHARE, SLACK = 0.01, 1000.0
"""What the bytes may be off by, as a share, and in bytes, for the loop's own counts."""


class Recorder(TorchDispatchMode):
    """Records the collectives of a step up to its update, including those of the backward pass, DDP and FSDP. What the
    optimizer sends (Muon does) is its own affair."""

    def __init__(self, subject: Subject) -> None:
        super().__init__()
        self.sent = 0.0
        """Bytes that this process sends, where each collective goes around a ring."""
        self.gradients: set[str] = set()
        """Names of the parameters that have a gradient."""
        self._model = subject.unwrapped

    def finish(self, *_: Any) -> None:
        """Record which parameters have a gradient, and nothing from here on."""
        self.gradients = {name for name, p in self._model.named_parameters() if p.grad is not None}

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        space, _, name = function._schema.name.partition("::")
        if "c10d" not in space or self.gradients or "wait" in name or "barrier" in name:
            return result
        # what is gathered or scattered is the whole tensor: the larger of what goes in and what comes out
        sides = [[t for t in tree_leaves(side) if isinstance(t, Tensor)] for side in (args[0], args[1:2], result)]
        size = max(map(num_bytes, sides))
        times = 2 if "allreduce" in name.replace("_", "") else 1
        by_name = dict(zip((argument.name for argument in function._schema.arguments), args, strict=False))
        members = ProcessGroup.unbox(by_name["process_group"]).size()
        self.sent += (members - 1) / members * size * times
        return result


def check_cost(subject: Subject) -> Iterator[Row]:
    """Examine the first step of the epoch, then time steps."""
    row, run, micro_batches = partial(finding, "Cost"), subject.run, next(subject.micro_batches(0))
    recorder = Recorder(subject)
    hook = run.optimizers[0].register_step_pre_hook(recorder.finish)
    with recorder:
        subject.step(subject.at(0), micro_batches)
    hook.remove()
    least, most, formula = expected_bytes(subject, len(micro_batches), recorder.gradients)
    sent = max(gather(recorder.sent))
    is_within = least * (1 - SHARE) - SLACK <= sent <= most * (1 + SHARE) + SLACK
    expected = f"{least / 1e6:,.3f}" + (f" to {most / 1e6:,.3f}" if most > least else "")
    cause = "not what the strategy has to send: gradients reduced after each micro-batch, or not at all, a strategy "
    cause += "other than it seems, or a model that communicates by itself"
    yield row("sent per step and process", f"{sent / 1e6:,.3f} MB", f"{expected} MB, {formula}", is_within, cause)
    steps = subject.micro_batches(0)
    next(steps)  # the first one augments the epoch, which is no part of a step's cost

    def compute() -> None:
        backward(run.task, subject.reference, [batch.data for batch in micro_batches])
        for optimizer in subject.reference_optimizers:
            optimizer.step()
            optimizer.zero_grad()

    data = median_ms(run, lambda: next(steps))
    step = median_ms(run, lambda: subject.step(subject.at(0), micro_batches))
    alone = median_ms(run, compute)
    measured = f"{data + step:,.1f} ms: data {data:,.1f}, compute {alone:,.1f} (by an unwrapped, eager copy), "
    yield row("time per step", f"{measured}communication, waiting, the rest {max(0.0, step - alone):,.1f}")
    copies = ", the examination's copies included"
    if run.device.type != "cpu":  # the peak of a process's resident memory can't be reset
        del subject.reference, subject.reference_optimizers
        copies = ""
        gc.collect()  # a model may be in a reference cycle
        torch.accelerator.reset_peak_memory_stats()
        subject.step(subject.at(0), micro_batches)
    peaks = ", ".join(f"{peak / 1e6:,.0f}" for peak in peak_memory(run.accelerator))
    yield row("peak memory per process", f"{peaks} MB{copies}")


def expected_bytes(subject: Subject, num_micro_batches: int, gradients: Collection[str]) -> tuple[float, float, str]:
    """Return the least and most bytes that a process sends in a step, and the formula.

    In a ring of N processes an all_reduce of S bytes sends 2 (N - 1) / N S; a reduce_scatter to shards, or an
    all_gather of them, half of that (Rajbhandari et al. 2020, https://arxiv.org/abs/1910.02054, section 7). FSDP may
    keep what is not in a block gathered for the backward pass, and does not reduce what is not in `gradients`. HSDP
    does all that among the processes that share a replica, then an all_reduce of each reduced shard over the replicas.
    """
    model, hook, replicas = subject.reference, subject.run.launch.comm_hook, num_replicas(subject.run.accelerator)
    world_size = subject.run.world_size // replicas if subject.is_fsdp else subject.run.world_size
    share = (world_size - 1) / world_size
    if subject.run.world_size == 1:
        return 0.0, 0.0, "nothing"
    if not subject.is_fsdp:
        trained = num_bytes(p for p in model.parameters() if p.requires_grad) * (0.5 if hook else 1.0)
        buffers = num_bytes(model.buffers())
        formula = "all_reduce of the gradients" + (f" in {hook}" if hook else "")
        formula += ", broadcast of the buffers" if buffers else ""
        sent = share * (2 * trained + buffers)
        return sent, sent, formula
    is_resharded = subject.run.accelerator.state.fsdp_plugin.reshard_after_forward
    blocks = [model.get_submodule(name) for name in blocks_to_wrap(subject)]
    blocks = [block for block in blocks if any(p.requires_grad for p in block.parameters())]  # else not gathered again
    in_blocks = {id(p) for block in blocks for p in block.parameters()}
    reductions = num_micro_batches if subject.run.config.fsdp_reduce_each_micro_batch else 1
    across = 2 * (replicas - 1) / replicas / (world_size - 1)  # bytes of the all_reduce per byte of the reduce_scatter
    least = most = 0.0
    for name, p in model.named_parameters():
        size = 4 * world_size * largest_shard(p, world_size)
        reduced = reductions * size * (1 + across) if p.requires_grad else 0
        gathered = num_micro_batches * size
        again = gathered if is_resharded else 0
        least += gathered + (reduced if name in gradients else 0) + (again if id(p) in in_blocks else 0)
        most += gathered + reduced + again
    gathers = (2 if is_resharded else 1) * num_micro_batches
    formula = f"{gathers} all_gather + {reductions} reduce_scatter of each parameter"
    formula += f" among {world_size}, all_reduce of each shard over {replicas} replicas" if replicas > 1 else ""
    return share * least, share * most, formula


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


def num_bytes(tensors: Iterable[Tensor]) -> int:
    """Return the bytes that the tensors take together."""
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)
