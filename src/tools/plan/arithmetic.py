"""A run's memory and work where there is no null GPU: formulas, and one step on tensors without data."""

import math
import os
import weakref
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import psutil
import torch
from accelerate import Accelerator
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from src.config.config import load_config
from src.tasks import TASKS
from src.tools.plan.measure import Measured, Setup, divisors, fill, require_examples
from src.training.batches import EVALUATION_FACTOR, fetch
from src.training.blocks import repeating_blocks
from src.training.gradients import local_gradients
from src.training.optim import build_optimizers
from src.training.transforms import transform
from src.training.work import Work

WORKSPACE = 64 << 20
"""What cuBLAS computes in, which torch allocates for it: 32 MiB on Hopper, for each of two kinds of product."""


class Live(TorchDispatchMode):
    """Adds up the bytes of the tensors that operators make and that are still there."""

    def __init__(self, known: Iterable[Tensor]) -> None:
        """Count nothing that shares its memory with `known` tensors."""
        super().__init__()
        self.now = self.most = 0
        self._seen = weakref.WeakSet(tensor.untyped_storage() for tensor in known)

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            storage = leaf.untyped_storage() if isinstance(leaf, Tensor) else None
            if storage is not None and storage not in self._seen:
                self._seen.add(storage)
                self._add(storage.nbytes())
                weakref.finalize(storage, self._add, -storage.nbytes())
        return result

    def _add(self, size: int) -> None:
        self.now += size
        self.most = max(self.most, self.now)


def calculate(setup: Setup) -> Measured:
    """Return what `measure` would, but for what only a device shows: kernels, waits, the host's time, fragmentation."""
    os.environ["WORLD_SIZE"] = str(setup.gpus)  # by which the sizes of batches are checked
    try:
        config = load_config([*setup.arguments], TASKS)
    finally:
        del os.environ["WORLD_SIZE"]
    strategy, n = Path(setup.yaml).stem, setup.gpus
    is_sharded = strategy.startswith(("fsdp", "hsdp"))
    size = setup.micro_batch or config.micro_batch(n)
    accumulation = config.global_batch_size // n // size
    train_set, eval_set = config.task.build_datasets()
    require_examples(len(train_set), size * n)
    batch = fetch(config.task, train_set, [*range(size)])
    notes = config.task.prepare_for("meta", torch.bfloat16)
    model = config.task.build_skeleton()
    transform(model, config.model_copy(update={"compile": False}), Accelerator(cpu=True))  # room: compile
    host = psutil.Process().memory_info().rss

    # ------------------------------------------------------------------------------------ a step without data
    flops = 0.0
    flops = config.task.flops(model, batch) * n * accumulation  # room: performance
    work = Work("cpu", setup.gpu.gpus_per_machine)
    keeps_gradients = strategy == "single_gpu" and accumulation == 1
    with FakeTensorMode(allow_non_fake_inputs=True):
        fill(model, torch.device("cpu"))
        parameters = [*model.parameters()]
        whole = {"parameters": _size(parameters), "gradients": _size(p for p in parameters if p.requires_grad)}
        for parameter in parameters:
            parameter.grad = torch.empty_like(parameter) if parameter.requires_grad else None
        with Live([*parameters, *local_gradients(parameters)]) as state, work:
            for optimizer in build_optimizers(config.optim, model):
                optimizer.step()
                optimizer.zero_grad()
        update = Counter(work.counts)
        whole["optimizer"] = state.now
        if is_sharded:  # computes with weights in half precision
            for parameter in parameters:
                parameter.data = parameter.data.bfloat16()
        if not keeps_gradients:
            for parameter in filter(lambda p: p.requires_grad, parameters):
                parameter.register_post_accumulate_grad_hook(lambda p: setattr(p, "grad", None))
        with Live([*parameters, *model.buffers()]) as live, torch.autocast("cpu", torch.bfloat16, not is_sharded), work:
            loss = config.task.loss(model, batch)
            kept = live.now
            loss.backward()
        examples = [*range(min(EVALUATION_FACTOR * size, math.ceil(len(eval_set) / n)))]
        with Live([*parameters, *model.buffers()]) as scores, torch.no_grad():
            with_autocast = torch.autocast("cpu", torch.bfloat16, not is_sharded)
            with_autocast(config.task.evaluate)(model.eval(), fetch(config.task, eval_set, examples))
    counts = {name: number * accumulation - (accumulation - 1) * update[name] for name, number in work.counts.items()}
    # a CPU has no products of half precision whose sums are in fp32, which a GPU computes the loss by
    counts["product flops bfloat16"] += counts.pop("product flops float32", 0)

    # ------------------------------------------------------------------------------- what each process has of it
    in_machine = min(n, setup.gpu.gpus_per_machine)
    shards = {"single_gpu": 1, "ddp": 1, "hsdp": in_machine}.get(strategy, n)
    parts = {name: number // shards for name, number in whole.items()}
    held = WORKSPACE + (0 if strategy.endswith("offload") else parts["parameters"] + parts["optimizer"])
    peak, evaluated = held + live.most, held + scores.most
    # those of earlier micro-batches; and DDP's buckets, twice in the second step, which finds a better order for them
    copies = int(accumulation > 1 and not strategy.endswith("offload")) + (2 if strategy == "ddp" else 0)
    peak += copies * parts["gradients"]
    evaluated += parts["gradients"] if strategy == "ddp" else 0
    count, trained = sum(p.numel() for p in parameters), whole["gradients"]
    place, cards = "within", 1
    if n > in_machine and strategy != "hsdp":
        place, cards = "between", in_machine
    if is_sharded:
        units = [_size(block.parameters()) for block in repeating_blocks(model)]
        units += [_size(module.parameters(recurse=False)) for module in model.modules()]
        # a unit's gradients in fp32, on their way to the others; the unit that computes and the next one, or all
        gathered = 2 * count if strategy == "fsdp_grad_op" else 2 * max(units)
        peak += 2 * max(units) + gathered
        evaluated += gathered
        gathers = 1 if strategy == "fsdp_grad_op" else 2
        counts[f"sent {place}"] = accumulation * (2 * count * gathers + trained) * (shards - 1) / shards / cards
        counts[f"collectives {place}"] = accumulation * (gathers + 1) * (len(repeating_blocks(model)) + 3)
        if strategy == "hsdp":
            counts["sent between"] = 2 * trained / shards * (1 - shards / n) * accumulation
    elif n > 1:
        counts[f"sent {place}"] = 2 * trained * (n - 1) / n / cards
    peaks, limit = {"step": (peak, live.most), "evaluation": (evaluated, scores.most)}, setup.gpu.capacity
    if setup.is_limited and max(peak, evaluated) > limit:
        raise torch.OutOfMemoryError
    fitting = [
        other
        for other in divisors(size * accumulation)
        if all(most + (other / size - 1) * of_batch <= limit for most, of_batch in peaks.values())
    ]
    tokens = 0.0
    tokens = config.task.count_tokens(batch)[0] * n * accumulation  # room: text
    return Measured(
        strategy=strategy,
        micro_batch=size,
        largest=max(fitting, default=0),
        accumulation=accumulation,
        model_flops=flops,
        tokens=tokens,
        total_steps=config.steps(math.ceil(len(train_set) / config.global_batch_size))[0],
        memory={phase: (most, most) for phase, (most, _) in peaks.items()},
        parts=parts | {"activations": kept},
        host_bytes=host + parts["parameters"],
        work={"host_seconds": 0.0, **counts},
        notes=notes,
    )


def _size(tensors: Iterable[Tensor]) -> int:
    return sum(tensor.nbytes for tensor in tensors)
