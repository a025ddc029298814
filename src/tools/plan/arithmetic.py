"""A run's memory and work where there is no null GPU: formulas, and one step on tensors without data."""

import math
import weakref
from collections import Counter
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import psutil
import torch
from accelerate import Accelerator
from accelerate.utils import patch_environment
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from src.config.config import Config, load_config
from src.tasks import TASKS
from src.tools.plan.measure import Measured, Setup, choose, divisors, fill, require_examples
from src.training.batches import EVALUATION_FACTOR, fetch
from src.training.blocks import repeating_blocks
from src.training.gradients import local_gradients
from src.training.optim import build_optimizers
from src.training.transforms import transform
from src.training.work import Work

WORKSPACE = 32 << 20
"""What cuBLAS computes a product in on Hopper."""
KEPT = 2 * WORKSPACE if torch.__version__ < "2.15" else 0
"""Before 2.15, torch kept one for each of two kinds of product; since then a product allocates it."""
PRODUCTS = torch.ops.aten.mm.default, torch.ops.aten.bmm.default


class Live(TorchDispatchMode):
    """Adds up the bytes of the tensors that operators make and that are still there."""

    def __init__(self, known: Iterable[Tensor]) -> None:
        """Count nothing that shares its memory with `known` tensors."""
        super().__init__()
        self.now = self.most = self.most_before = 0
        self._seen = weakref.WeakSet(tensor.untyped_storage() for tensor in known)

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            storage = leaf.untyped_storage() if isinstance(leaf, Tensor) else None
            if storage is not None and storage not in self._seen:
                self._seen.add(storage)
                self._add(storage.nbytes())
                weakref.finalize(storage, self._add, -storage.nbytes())
        if function in PRODUCTS and not KEPT:
            self.most = max(self.most, self.now + WORKSPACE)
        return result

    def start_again(self, *_: Any) -> None:
        """Keep `most` as `most_before`, and look from now on for another one. Takes what a hook is called with."""
        self.most_before, self.most = self.most, self.now

    def _add(self, size: int) -> None:
        self.now += size
        self.most = max(self.most, self.now)


class Step(NamedTuple):
    """What a step takes of a process that shares it with no other; in bytes at most, but for `work`."""

    parameters: int
    gradients: int
    optimizer: int
    activations: int
    """Of a micro-batch, until the backward pass has left the last block."""
    backward: int
    """From there on; and gradients, where they are kept as they come."""
    evaluation: int
    work: Any
    """As Work counts it."""


def calculate(setup: Setup) -> Measured:
    """Return what `measure` would, but for what only a device shows: kernels, waits, the host's time, fragmentation."""
    n = setup.gpus
    with patch_environment(world_size=n):  # by which the sizes of batches are checked
        config = load_config([*setup.arguments], TASKS)
    strategy, capacity = Path(setup.yaml).stem, setup.gpu.capacity
    is_sharded = strategy.startswith(("fsdp", "hsdp"))
    size, accumulation = config.micro_batch(n), config.accumulation(n)
    train_set, eval_set = config.task.build_datasets()
    require_examples(len(train_set), size * n)
    batch = fetch(config.task, train_set, [*range(size)])
    scored = fetch(config.task, eval_set, [*range(min(EVALUATION_FACTOR * size, math.ceil(len(eval_set) / n)))])
    notes = config.task.prepare_for("meta", torch.bfloat16)
    model = config.task.build_skeleton()
    transform(model, config.model_copy(update={"compile": False}), Accelerator(cpu=True))  # room: compile
    flops = tokens = 0.0
    flops = config.task.flops(model, batch) * n * accumulation  # room: performance
    tokens = config.task.count_tokens(batch)[0] * n * accumulation  # room: text
    step = step_without_data(setup, config, model, batch, scored)

    # -------------------------------------------------------------------------- what each process has, and sends
    in_machine = min(n, setup.gpu.gpus_per_machine)
    shards = {"single_gpu": 1, "ddp": 1, "hsdp": in_machine}.get(strategy, n)
    parts = {name: getattr(step, name) // shards for name in ("parameters", "gradients", "optimizer")}
    held = evaluated = KEPT
    reduced = 0
    if not strategy.endswith("offload"):
        held += parts["parameters"] + parts["optimizer"]
        evaluated = held
        if accumulation > 1:  # the sum over earlier micro-batches
            held += parts["gradients"]
    place, cards = "within", 1
    if n > in_machine and strategy != "hsdp":
        place, cards = "between", in_machine
    work: dict[str, float] = step.work
    if is_sharded:
        blocks = repeating_blocks(model)
        units = [_size(block.parameters()) for block in blocks]
        units += [_size(module.parameters(recurse=False)) for module in model.modules()]
        weights = _size(model.parameters())
        gathered, gathers = 2 * max(units), 2  # the unit that computes, and the next one
        if strategy == "fsdp_grad_op":
            gathered, gathers = weights, 1
            evaluated += max(units)  # what the last one arrives in
        held += gathered
        evaluated += gathered
        reduced = 2 * max(units)  # a unit's gradients in fp32, on their way to the others
        sent = weights * gathers + step.gradients
        work[f"sent {place}"] = accumulation * sent * (shards - 1) / shards / cards
        work[f"collectives {place}"] = accumulation * (gathers + 1) * (len(blocks) + 3)
        if strategy == "hsdp":
            work["sent between"] = accumulation * 2 * parts["gradients"] * (1 - shards / n)
    elif n > 1:
        work[f"sent {place}"] = 2 * step.gradients * (n - 1) / n / cards
        held += 2 * step.gradients  # DDP's buckets, of which the second step makes new ones, in a better order
        evaluated += step.gradients

    def peaks_of(examples: int) -> dict[str, int]:
        share = examples / size
        computing = max(step.activations * share, reduced + step.backward * share)
        return {"step": held + int(computing), "evaluation": evaluated + int(step.evaluation * share)}

    chosen, largest = choose(divisors(size * accumulation), size, capacity, lambda size: max(peaks_of(size).values()))
    if chosen != size:
        return calculate(replace(setup, arguments=(*setup.arguments, f"--micro_batch_size={chosen}")))
    return Measured(
        strategy=strategy,
        micro_batch=size,
        largest=largest,
        accumulation=accumulation,
        model_flops=flops,
        tokens=tokens,
        total_steps=config.steps(math.ceil(len(train_set) / config.global_batch_size))[0],
        memory={phase: (most, most) for phase, most in peaks_of(size).items()},
        parts=parts | {"activations": max(step.activations, step.backward)},
        host_bytes=psutil.Process().memory_info().rss + parts["parameters"],
        work={"host_seconds": 0.0, **work},
        notes=notes,
    )


def step_without_data(setup: Setup, config: Config, model: nn.Module, batch: Any, scored: Any) -> Step:
    """Take a step and evaluate on tensors that have shapes alone, on the CPU; leave the model in the dtype that it
    computes with."""
    strategy, accumulation = Path(setup.yaml).stem, config.accumulation(setup.gpus)
    is_sharded = strategy.startswith(("fsdp", "hsdp"))
    update, passes = Work("cpu", 1), Work("cpu", 1)
    with FakeTensorMode(allow_non_fake_inputs=True):
        fill(model, torch.device("cpu"))
        parameters = [*model.parameters()]
        trained = [parameter for parameter in parameters if parameter.requires_grad]
        sizes = _size(parameters), _size(trained)
        for parameter in trained:
            parameter.grad = torch.empty_like(parameter)
        with Live([*parameters, *local_gradients(parameters)]) as state, update:
            optimizers = build_optimizers(config.optim, model)
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
        if is_sharded:  # gathered in half precision
            for parameter in parameters:
                parameter.data = parameter.data.bfloat16()
        if strategy != "single_gpu" or accumulation > 1:  # gradients have their place before the backward pass
            for parameter in trained:
                parameter.register_post_accumulate_grad_hook(lambda p: setattr(p, "grad", None))
        half = torch.autocast("cpu", torch.bfloat16)
        computing = Live([*parameters, *model.buffers()])
        for block in repeating_blocks(model)[-1:]:
            block.register_full_backward_hook(computing.start_again)
        with computing, half, passes:
            config.task.loss(model, batch).backward()
        with Live([*parameters, *model.buffers()]) as scoring, half, torch.no_grad():
            config.task.evaluate(model.eval(), scored)
    work = Counter({name: number * accumulation for name, number in passes.counts.items()}) + update.counts
    # a CPU has no products of half precision whose sums are in fp32, which a GPU computes the loss by
    work["product flops bfloat16"] += work.pop("product flops float32", 0)
    return Step(*sizes, state.now, computing.most_before, computing.most, scoring.most, work)


def _size(tensors: Iterable[Tensor]) -> int:
    return sum(tensor.nbytes for tensor in tensors)
