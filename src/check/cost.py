"""Checks 9 and 10, Precision and Cost: what one step really computes in, sends and takes."""

from __future__ import annotations

import gc
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from src.data.loading import MicroBatch
from src.check.findings import Finding
from src.check.launch import blocks_to_wrap, largest_shard
from src.check.subject import Reference, Subject
from src.launch import peak_memory
from src.reference import backward

LOSSES = (
    "log_softmax", "nll_loss", "mse_loss", "binary_cross_entropy", "smooth_l1_loss", "huber_loss", "soft_margin_loss",
    "ctc_loss", "linear_cross_entropy",
)  # fmt: skip
"""In the names of operators: what losses are made of."""
PRODUCTS = ("mm", "addmm", "bmm", "convolution", "product")  # the last one: src/mkl.py's
"""Names of operators: where most of the computing is."""
ROUNDS = 3
"""Steps to take the median time of."""
SLACK = 0.01, 1000.0
"""What the bytes may be off by: a share, and the loop's own counts."""


class Recorder(TorchDispatchMode):
    """Sees each operator and collective of a step, also those of the backward pass, DDP's and FSDP's."""

    def __init__(self, world_size: int) -> None:
        super().__init__()
        self.losses: Counter[str] = Counter()
        """Operators that compute losses, by dtype."""
        self.products: Counter[str] = Counter()
        """Matrix products and convolutions, by dtype."""
        self.reductions: Counter[str] = Counter()
        """Bytes reduced, by dtype."""
        self.is_done = False
        """Set when the step comes to its update: what the optimizer sends is its own affair (Muon does)."""
        self.sent = 0.0
        """Bytes that this process sends, where each collective goes around a ring."""
        self._world_size = world_size

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        space, _, name = function._schema.name.partition("::")
        if self.is_done:
            return result
        if "c10d" in space:
            self._count(name, args, result)
        elif any(loss in name and "backward" not in name for loss in LOSSES):
            self.losses[_short(args[0].dtype)] += 1
        elif name in PRODUCTS:
            self.products[_short(args[0].dtype)] += 1
        return result

    def _count(self, name: str, args: Sequence[Any], result: Any) -> None:
        # the whole tensor is what is gathered, or what is scattered: the larger one of what goes in and comes out
        sides = [[t for t in tree_leaves(side) if isinstance(t, Tensor)] for side in (args[0], args[1:2], result)]
        size = max(sum(t.numel() * t.element_size() for t in side) for side in sides)
        name = name.replace("_", "")
        # a send, of src/gloo.py's reduce_scatter, is of one part alone
        share = 1.0 if name == "send" else (self._world_size - 1) / self._world_size
        if "allreduce" in name or "reducescatter" in name or name == "send":
            self.reductions[_short(sides[0][0].dtype)] += size
        if not any(kind in name for kind in ("wait", "barrier", "recv")):
            self.sent += share * size * (2 if "allreduce" in name else 1)


def examine(subject: Subject, reference: Reference) -> Iterator[Finding]:
    """On the first window of the epoch."""
    window = next(subject.windows(0))
    recorder, gradients = Recorder(subject.world_size), Counter[str]()
    unused: set[str] = set()

    def at_update(*_: object) -> None:
        recorder.is_done = True
        gradients.update(_short(p.grad.dtype) for p in subject.model.parameters() if p.grad is not None)
        unused.update(name for name, p in subject.bare().named_parameters() if p.grad is None)

    hook = subject.optimizers[0].register_step_pre_hook(at_update)
    with recorder:
        subject.step(window, subject.progress(0))
    hook.remove()
    yield from _precision(subject, window, recorder, gradients)
    yield from _cost(subject, reference, window, recorder, unused)


def _precision(
    subject: Subject, window: list[MicroBatch], recorder: Recorder, gradients: Counter[str]
) -> Iterator[Finding]:
    trained = Counter(_short(p.dtype) for p in subject.model.parameters() if p.requires_grad)
    frozen = Counter(_short(p.dtype) for p in subject.model.parameters() if not p.requires_grad)
    states = [s for o in subject.optimizers for state in o.state.values() for s in state.values()]
    state = Counter(_short(s.dtype) for s in states if torch.is_tensor(s))
    lost = "small updates are lost in half precision: load the weights in fp32, and let mixed precision compute in half"
    yield _all_fp32("trained parameters", trained, lost)
    if frozen:
        yield Finding("Precision", "frozen parameters", _count(frozen))
    yield _all_fp32("gradients", gradients, lost)
    yield _all_fp32("optimizer state", state, lost)
    if recorder.reductions:
        ((dtype, _),) = recorder.reductions.most_common(1)
        yield Finding("Precision", "reduction of the gradients", dtype)
    asked = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}.get(subject.launch.precision)
    yield Finding(
        "Precision",
        "matrix products",
        _count(recorder.products),
        f"{asked}, some at least" if asked else "",
        asked is None or asked in recorder.products,
        f"{subject.launch.precision} was asked for and is not what is computed in: the model was not passed through "
        "prepare(), or casts by itself",
    )
    with torch.no_grad():
        loss, _ = subject.task.loss(subject.model, window[0].to(subject.device))
    dtypes = recorder.losses + Counter([_short(loss.dtype)])
    yield Finding(
        "Precision",
        "loss",
        _count(dtypes),
        "no half precision",
        not {"bfloat16", "float16"} & dtypes.keys(),
        "the loss is computed in half precision, with 8 to 11 bits, and so is its gradient: take it of logits.float()",
    )


def _all_fp32(what: str, found: Counter[str], means: str) -> Finding:
    return Finding("Precision", what, _count(found), "float32", not {"bfloat16", "float16"} & found.keys(), means)


def _cost(
    subject: Subject, reference: Reference, window: list[MicroBatch], recorder: Recorder, unused: set[str]
) -> Iterator[Finding]:
    least, most, formula = _expected_bytes(subject, reference, window, unused)
    share, slack = SLACK
    expected = f"{least / 1e6:,.3f}" + (f" to {most / 1e6:,.3f}" if most > least else "")
    sent = max(subject.gather(recorder.sent))
    yield Finding(
        "Cost",
        "sent per step and process",
        f"{sent / 1e6:,.3f} MB",
        f"{expected} MB, {formula}",
        least * (1 - share) - slack <= sent <= most * (1 + share) + slack,
        "not what the strategy has to send: gradients reduced after each micro-batch, or not at all, another "
        "strategy than it seems, or a model that communicates by itself",
    )
    times: dict[str, list[float]] = {"data": [], "step": [], "compute": []}
    windows = subject.windows(0)
    next(windows)  # the first one's augmentation of an epoch is no cost of a step
    for _ in range(ROUNDS):
        times["data"].append(_seconds(subject, lambda: next(windows)))
        times["step"].append(_seconds(subject, lambda: subject.step(window, subject.progress(0))))
        times["compute"].append(_seconds(subject, lambda: _compute(subject, reference, window)))
    data, step, compute = (max(subject.gather(1000 * statistics.median(times[name]))) for name in times)
    yield Finding(
        "Cost",
        "time per step",
        f"{data + step:,.1f} ms: data {data:,.1f}, compute {compute:,.1f} (by an unwrapped, eager copy), "
        f"communication, waiting, the rest {max(0.0, step - compute):,.1f}",
    )
    del reference.model, reference.optimizers
    has_copies = "" if _reset_peak(subject) else ", the examination's copies included"
    subject.step(window, subject.progress(0))
    peaks = ", ".join(f"{peak / 1e6:,.0f}" for peak in peak_memory(subject.accelerator))
    yield Finding("Cost", "peak memory per process", f"{peaks} MB{has_copies}")


def _expected_bytes(
    subject: Subject, reference: Reference, window: list[MicroBatch], unused: set[str]
) -> tuple[float, float, str]:
    """What a process sends in a step where each collective goes around a ring of N processes: least, most, and the
    formula. An all_reduce of S bytes sends 2 (N - 1) / N S; a reduce_scatter to shards, or an all_gather of them, half
    of that. Least and most differ where FSDP keeps what is not in a block gathered for the backward pass, and in the
    gradients of `unused` parameters, which it does not reduce.

    Source: Rajbhandari et al. 2020, https://arxiv.org/abs/1910.02054, section 7.
    """
    world_size, model = subject.world_size, reference.model
    share = (world_size - 1) / world_size
    if world_size == 1:
        return 0.0, 0.0, "nothing"
    if not subject.accelerator.is_fsdp2:
        trained = sum(p.numel() * p.element_size() for p in model.parameters() if p.requires_grad)
        buffers = sum(b.numel() * b.element_size() for b in model.buffers())
        hook = subject.launch.comm_hook
        width = 0.5 if hook else 1.0
        what = "all_reduce of the gradients" + (f" in {hook}" if hook else "")
        what += ", broadcast of the buffers" if buffers else ""
        sent = share * (2 * trained * width + buffers)
        return sent, sent, what
    plugin = subject.accelerator.state.fsdp_plugin
    policy = plugin.mixed_precision_policy
    width = policy.param_dtype.itemsize if policy and policy.param_dtype else 4
    blocks = [model.get_submodule(name) for name in blocks_to_wrap(subject, reference)]
    blocks = [block for block in blocks if any(p.requires_grad for p in block.parameters())]  # else not gathered again
    in_blocks = {id(p) for block in blocks for p in block.parameters()}
    least = most = 0.0
    for name, p in model.named_parameters():
        size = world_size * largest_shard(p, world_size)
        reduced = 4 * size if p.requires_grad else 0
        again = width * size if plugin.reshard_after_forward else 0
        least += width * size + (0 if name in unused else reduced) + (again if id(p) in in_blocks else 0)
        most += width * size + reduced + again
    factor, count = share * len(window), f" x {len(window)} micro-batches" if len(window) > 1 else ""
    gathers = "2 all_gather" if plugin.reshard_after_forward else "1 all_gather"
    return factor * least, factor * most, f"{gathers} + 1 reduce_scatter{count}"


def _compute(subject: Subject, reference: Reference, window: list[MicroBatch]) -> None:
    with reference.autocast(subject.half):
        backward(subject.task, reference.model, [micro_batch.data for micro_batch in window])
    for optimizer in reference.optimizers:
        optimizer.step()
        optimizer.zero_grad()


def _seconds(subject: Subject, work: Callable[[], object]) -> float:
    subject.accelerator.wait_for_everyone()
    started = time.perf_counter()
    work()
    if subject.device.type != "cpu":
        torch.accelerator.synchronize()
    return time.perf_counter() - started


def _reset_peak(subject: Subject) -> bool:
    """Whether it can be: the peak of a process's resident memory cannot."""
    if subject.device.type == "cpu":
        return False
    gc.collect()
    torch.accelerator.reset_peak_memory_stats()
    return True


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _count(dtypes: Counter[str]) -> str:
    return ", ".join(f"{count} {dtype}" for dtype, count in sorted(dtypes.items())) or "none"
