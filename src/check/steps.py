"""Checks 4 to 6, Gradients, Updates and Accumulation: steps of the run, each held against one by hand."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from src.check.findings import (
    COMPRESSED,
    EXACT,
    HALF,
    REORDERED,
    Finding,
    WorstError,
    gather,
    norm,
    relative_error,
    relative_errors,
)
from src.check.subject import (
    Autocast,
    Subject,
    WithheldOptimizer,
    capture_update,
    checksum,
    optimizer_counts,
    whole,
)
from src.data.loading import MicroBatch
from src.optim import Schedule, lr_at, set_lr
from src.reference import all_reduce, average_gradients, backward

NOISE_FACTOR_ALIKE = 2.0
"""In half precision an error may be so many times that of one unwrapped model, between autocast to bf16 and fp32: where
the run is held against that model under the same autocast."""
NOISE_FACTOR = 4.0
"""Where under another, or in other micro-batches."""
NOISE_FACTOR_FSDP = 16.0
"""Under FSDP, which computes all in half precision, where autocast does only what bears it well."""
UPDATE = 1e-3
"""Largest error of an update, as a share of it: a small one is 1e-4 of its weight, whose rounding is 1e-7."""
MUON_UPDATE = 0.5
"""Muon iterates in bf16: the order of a sum, which sharding changes, makes a matrix's update another by up to 0.16."""
LEARNING_RATE = 1e-9
"""Largest relative error of a learning rate: a number of Python's, and early in a warm-up hardly different at the next
step."""
BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
RANDOMNESS = "randomness (dropout, …)"


@dataclass
class ByHand:
    """What the reference makes of a global batch."""

    gradients: dict[str, Tensor]
    """Of its mean loss, by the parameter's name; not clipped."""
    loss: float
    noise: dict[str, float]
    """Relative errors that half precision makes of the gradients, by name, and of `all`; empty in fp32."""
    noise_factor: float
    """How many times that the run may err."""


def check_steps(subject: Subject) -> Iterator[Finding]:
    """Take the first two steps of an epoch and its last, ragged one. Before each, the reference takes over the run's
    weights; it has gradients of its own, but then updates with the run's: each fault shows in one of the two."""
    run, config, reference = subject.run, subject.run.config, subject.reference
    schedule = Schedule(config.steps(subject.steps_per_epoch)[1], subject.steps_per_epoch)  # what the run's should be
    first = subject.micro_batches(0)
    examined = [next(first), next(first), next(subject.micro_batches(schedule.steps_per_epoch - 1))]
    steps = [min(step, schedule.steps - 1) for step in (0, 1, schedule.steps // 2)]  # whose learning rate they have
    randomness, is_training = _randomness(subject, examined[0])
    exact = REORDERED if config.compile else EXACT
    bound = max(exact, COMPRESSED if run.launch.comm_hook else 0)
    gradients, norms, losses = WorstError(bound), WorstError(bound), WorstError(HALF if subject.is_half else exact)
    is_muon_sharded = config.optim.name == "muon" and subject.is_fsdp
    learning_rates, updates = WorstError(LEARNING_RATE), WorstError(MUON_UPDATE if is_muon_sharded else UPDATE)
    for number, (step, micro_batches) in enumerate(zip(steps, examined, strict=True), start=1):
        name = f"step {number}"
        for model in (run.model, reference):
            model.train(is_training)
        subject.copy_to_reference()
        before = {name: parameter.detach().clone() for name, parameter in reference.named_parameters()}
        expected = _by_hand(subject, micro_batches)
        expected_norm = norm(expected.gradients.values())
        max_norm = None
        if config.optim.max_grad_norm is not None:
            is_above = number > 1  # one step is below its limit, which must leave it as it is, the others above
            max_norm = expected_norm * (0.5 if is_above else 2.0)
            for gradient in expected.gradients.values():
                gradient *= max_norm / (expected_norm + 1e-6) if is_above else 1.0
        optim = config.optim.model_copy(update={"max_grad_norm": max_norm})
        limited = subject.at(step, config=config.model_copy(update={"optim": optim}))
        subject.seed()
        with capture_update(limited) as update:
            result = subject.step(limited, micro_batches)
        if result.grad_norm is None:
            yield Finding("Gradients", "finite", "not finite", "finite", False)
            return
        noise = expected.noise, expected.noise_factor
        gradients.add(relative_errors(update.gradients, expected.gradients), *noise)
        losses.add({name: relative_error(result.loss, expected.loss)})
        norms.add({name: relative_error(result.grad_norm, expected_norm)}, *noise)
        lr = lr_at(step, config.optim, *schedule)
        learning_rates.add({name: max(relative_error(found, lr) for found in update.learning_rates)})
        _update_reference(subject, update.gradients, lr)
        updates.add(_update_errors(subject, before))
    run.model.train()
    yield Finding("Gradients", RANDOMNESS, randomness)
    yield gradients.finding("Gradients", "largest relative error")
    yield losses.finding("Gradients", "loss, relative error")
    clipped = "not clipped" if config.optim.max_grad_norm is None else "clipped at 2 x, 0.5 x it"
    yield norms.finding("Gradients", f"norm, {clipped}")
    yield from _membership(subject)
    yield learning_rates.finding("Updates", "learning rate")
    yield updates.finding("Updates", "parameters after each step")
    yield from _replicas(subject)


def _by_hand(subject: Subject, micro_batches: list[MicroBatch]) -> ByHand:
    """Compute the step from this process's micro-batches, with the random numbers that one after `seed` draws: in fp32,
    but under autocast where the run does the same to the same operators. Collective."""
    factor = NOISE_FACTOR_FSDP if subject.is_fsdp else NOISE_FACTOR
    exact, loss = _gradients_by_hand(subject, subject.reference, micro_batches)
    if not subject.is_half:
        return ByHand(exact, loss, {}, factor)
    autocast = Autocast(subject.reference, torch.bfloat16)  # for fp16, too, which would need its loss scaled
    rough, rough_loss = _gradients_by_hand(subject, autocast, micro_batches)
    noise = relative_errors(rough, exact)
    if subject.autocasts_to_bf16:
        return ByHand(rough, rough_loss, noise, NOISE_FACTOR_ALIKE)
    return ByHand(exact, loss, noise, factor)


def _gradients_by_hand(
    subject: Subject, model: nn.Module, micro_batches: list[MicroBatch]
) -> tuple[dict[str, Tensor], float]:
    task, reference = subject.run.task, subject.reference
    subject.seed()
    loss_sum, count = backward(task, model, [batch.data for batch in micro_batches if batch.weight])
    for batch in micro_batches:  # a model may have collectives (SyncBatchNorm): as many forward passes everywhere
        if not batch.weight:
            (task.loss(model, batch.to(subject.run.device))[0] * 0).backward()
    loss_sum, count = all_reduce(loss_sum), all_reduce(count)
    average_gradients(reference, count)
    gradients = {name: p.grad for name, p in reference.named_parameters() if p.grad is not None}
    reference.zero_grad()
    return gradients, (loss_sum / count.clamp(min=1)).item()


def _randomness(subject: Subject, micro_batches: list[MicroBatch]) -> tuple[str, bool]:
    """Return what the table says of it, and whether the steps are those of training mode."""
    losses = []
    for seed in (0, 1):
        torch.manual_seed(seed)
        batches = [batch.to(subject.run.device) for batch in micro_batches]
        with torch.no_grad():
            losses.append([float(subject.run.task.loss(subject.reference, batch)[0]) for batch in batches])
    if not any(gather(losses[0] != losses[1])):
        return "the model draws none", True
    if subject.run.config.compile:
        return "switched off (eval mode): compiled code draws other numbers", False
    if subject.is_half and not subject.autocasts_to_bf16:  # its tensors may lie in memory in another order
        return "switched off (eval mode): in fp32, it may draw others", False
    return "on, seeded alike in the run and by hand", True


def _update_reference(subject: Subject, gradients: Mapping[str, Tensor], lr: float) -> None:
    for name, parameter in subject.reference.named_parameters():
        parameter.grad = gradients.get(name)
    set_lr(subject.reference_optimizers, lr)
    for optimizer in subject.reference_optimizers:
        optimizer.step()
    subject.reference.zero_grad()


def _update_errors(subject: Subject, before: Mapping[str, Tensor]) -> dict[str, float]:
    """Return by name the distance from the reference as a share of how far that has moved."""
    errors, reference = {}, dict(subject.reference.named_parameters())
    for name, parameter in subject.unwrapped.named_parameters():
        found, expected = whole(parameter, subject.run.device), reference[name].detach()
        moved = norm([expected - before[name]])
        errors[name] = norm([found - expected]) / (moved + 1e-6 * norm([expected]) + 1e-30)
    return errors


def _membership(subject: Subject) -> Iterator[Finding]:
    row = partial(Finding, "Updates")
    trained = {name: p for name, p in subject.unwrapped.named_parameters() if p.requires_grad}
    counts, total = optimizer_counts(subject.run), len(trained)
    absent = [name for name, p in trained.items() if counts[id(p)] == 0]
    again = [name for name, p in trained.items() if counts[id(p)] > 1]
    measured = f"{total - len(absent)} of {total} trained parameters"
    measured += f", not {absent[0]}" if absent else ""
    measured += f", {again[0]} twice" if again else ""
    yield row("in the optimizer", measured, "each once", not absent and not again)
    wrong = _wrong_groups(subject, trained)
    measured = f"{total - len(wrong)} of {total} as they should" + (f", not {wrong[0]}" if wrong else "")
    yield row("optimizer and weight decay", measured, "matrices decay, vectors not", not wrong)


def _wrong_groups(subject: Subject, trained: Mapping[str, Tensor]) -> list[str]:
    """Return the names of parameters that have another optimizer or weight decay than they should have: the rule of
    src/optim.py, written a second time."""
    optim, layers = subject.run.config.optim, list(subject.unwrapped.modules())
    found = {
        id(p): (type(optimizer).__name__, group["weight_decay"])
        for optimizer in subject.run.optimizers
        for group in optimizer.param_groups
        for p in group["params"]
    }
    ends = {id(layer.weight) for layer in layers if isinstance(layer, nn.Embedding)}
    ends |= {id(layer.weight) for layer in [layer for layer in layers if isinstance(layer, nn.Linear)][-1:]}
    kind = {"adamw": "AdamW", "muon": "AdamW", "sgd": "SGD", "adadelta": "Adadelta"}[optim.name]
    wrong = []
    for name, p in trained.items():
        is_muons = optim.name == "muon" and len(p.shape) == 2 and min(p.shape) > 1 and id(p) not in ends
        expected = "Muon" if is_muons else kind, optim.weight_decay if len(p.shape) > 1 else 0.0
        if found.get(id(p)) != expected:
            wrong.append(name)
    return wrong


def _replicas(subject: Subject) -> Iterator[Finding]:
    row, model, drifted = partial(Finding, "Updates"), subject.unwrapped, subject.drifted()
    if subject.is_fsdp:
        yield row("replicas", "none: each process has its own shard")
    else:
        sums = gather(checksum(list(model.parameters())))
        is_same = len(set(sums)) == 1
        measured = f"{sums[0]} on all {len(sums)}" if is_same else ", ".join(sums)
        yield row("replicas, checksum by process", measured, "the same", is_same)
    buffers = dict(model.named_buffers())
    differing = ", ".join([name for name in drifted if name in buffers][:3])
    measured = f"{differing}: differs" if differing else f"{len(buffers)}, none of which drifts apart"
    yield row("buffers", measured, "the same", not differing)
    local = [name for name, m in model.named_modules() if isinstance(m, BATCH_NORMS) and subject.run.world_size > 1]
    if local:
        more = f"{local[0]} and {len(local) - 1} more"
        yield row("batch norm", f"{more}: each process's examples alone, so that the curve depends on them")


def check_accumulation(subject: Subject) -> Iterator[Finding]:
    """Take the first step of the epoch and its last, ragged one in micro-batches of other sizes: without the update,
    and in eval mode, as dropout would draw other numbers."""
    run = subject.run
    own = run.config.micro_batch(run.world_size)
    sizes = _other_sizes(run.config.global_batch_size // run.world_size, own)
    if not sizes:
        yield Finding("Accumulation", "other micro-batches", f"none: a process has {own} example per batch")
        return
    for model in (run.model, subject.reference):
        model.eval()
    subject.copy_to_reference()
    gradients = WorstError(COMPRESSED if run.launch.comm_hook else REORDERED)
    losses = WorstError(HALF if subject.is_half else REORDERED)
    factor = NOISE_FACTOR_FSDP if subject.is_fsdp else NOISE_FACTOR
    for step, others in ((0, sizes[:1]), (subject.steps_per_epoch - 1, sizes)):
        micro_batches = next(subject.micro_batches(step))
        noise = _by_hand(subject, micro_batches).noise if subject.is_half else {}
        expected, expected_loss = _withheld_step(subject, micro_batches)
        for size in others:
            found, loss = _withheld_step(subject, next(subject.micro_batches(step, size)))
            gradients.add(relative_errors(found, expected), noise, factor)
            losses.add({f"micro-batches of {size}": relative_error(loss, expected_loss)})
    run.model.train()
    yield Finding("Accumulation", RANDOMNESS, "switched off (eval mode)")
    split = f"{' and '.join(map(str, sizes))} in place of {own}"
    yield gradients.finding("Accumulation", f"gradient: {split}")
    yield losses.finding("Accumulation", f"loss: {split}")


def _other_sizes(share: int, own: int) -> list[int]:
    """Return, of the micro-batches that a process's share of a global batch can be cut into, the next two smaller ones
    or, where there is none, the next larger one, for which the memory may not be there."""
    sizes = [size for size in range(1, share + 1) if share % size == 0]
    at = sizes.index(own)
    return sizes[:at][::-1][:2] or sizes[at + 1 : at + 2]


def _withheld_step(subject: Subject, micro_batches: list[MicroBatch]) -> tuple[dict[str, Tensor], float]:
    """Return the gradients and the mean loss of a step that leaves the weights as they are."""
    run = subject.at(0, optimizers=[WithheldOptimizer(optimizer) for optimizer in subject.run.optimizers])
    with capture_update(run) as update:
        result = subject.step(run, micro_batches)
    return update.gradients, result.loss
