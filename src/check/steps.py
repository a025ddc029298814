"""Checks 4 and 5, Gradients and Updates: three steps of the run, each held against one by hand."""

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from src.data.loading import MicroBatch
from src.check.by_hand import by_hand, taken
from src.check.data import steps_per_epoch
from src.check.errors import COMPRESSED, EXACT, REORDERED, Worst, norm, off, relative_errors, verdict
from src.check.findings import Finding
from src.check.subject import Reference, Subject, checksum, whole
from src.optim import Schedule, lr_at, set_lr

UPDATE = 1e-3
"""Largest error of an update, as a share of it: a small one is 1e-4 of its weight, whose rounding is 1e-7."""
MUON_UPDATE = 0.5
"""Muon iterates in bf16: the order of a sum, which sharding changes, makes a matrix's update another by up to 0.16."""
BATCH_NORMS = (torch.nn.BatchNorm1d, torch.nn.BatchNorm2d, torch.nn.BatchNorm3d)
RATE = 1e-9
"""Largest relative error of a learning rate: a number of Python's, and early in a warm-up hardly different at the next
step."""


def examine(subject: Subject, reference: Reference) -> Iterator[Finding]:
    """The first two windows of an epoch and its last, ragged one. Before each step the reference takes over the run's
    weights; it has gradients of its own, but then updates with the run's: each fault shows in one of the two."""
    config, per_epoch = subject.config, steps_per_epoch(subject)
    schedule = Schedule(config.steps(per_epoch)[1], per_epoch)  # what the run's own should be
    windows = subject.windows(0)
    examined = [next(windows), next(windows), next(subject.windows(schedule.steps_per_epoch - 1))]
    steps = [min(step, schedule.steps - 1) for step in (0, 1, schedule.steps // 2)]  # whose learning rate they have
    randomness, is_training = _randomness(subject, reference, examined[0])
    exact = REORDERED if config.compile else EXACT
    gradient = max(exact, COMPRESSED if subject.launch.comm_hook else 0)
    is_muon_sharded = config.optim.name == "muon" and subject.accelerator.is_fsdp2
    gradients, updates = Worst(gradient), Worst(MUON_UPDATE if is_muon_sharded else UPDATE)
    losses, norms, rates = Worst(1e-2 if subject.is_half else exact), Worst(gradient), Worst(RATE)
    for number, (step, window) in enumerate(zip(steps, examined, strict=True), start=1):
        for model in (subject.model, reference.model):
            model.train(is_training)
        reference.copy_from(subject)
        before = {name: parameter.detach().clone() for name, parameter in reference.model.named_parameters()}
        expected = by_hand(subject, reference, window)
        expected_norm = norm(expected.gradients.values())
        limit = None
        if config.optim.max_grad_norm is not None:
            is_above = number > 1  # one step below its limit, which must leave it as it is, the others above
            limit = expected_norm * (0.5 if is_above else 2.0)
            if is_above:
                expected.clip(expected_norm, limit)
        subject.seed()
        with taken(subject) as found:
            done = subject.step(window, subject.progress(step), limit)
        if done.grad_norm is None:
            yield Finding("Gradients", "finite", "not finite", "finite", False, "the loss or its gradient overflows")
            return
        gradients.add(relative_errors(found.gradients, expected.gradients), expected.noise, expected.noise_factor)
        losses.add({f"step {number}": off(done.loss, expected.loss)})
        norms.add({f"step {number}": off(done.grad_norm, expected_norm)}, expected.noise, expected.noise_factor)
        rate = lr_at(step, config.optim, *schedule)
        rates.add({f"step {number}": max(off(found_rate, rate) for found_rate in found.rates)})
        _update(reference, found.gradients, rate)
        updates.add(_update_errors(subject, reference, before))
    subject.model.train()
    yield Finding("Gradients", "randomness (dropout, …)", randomness)
    yield Finding(
        "Gradients",
        "largest relative error",
        *verdict(subject.gather(gradients)),
        "not the gradient of the whole batch's mean loss: a sum that was not divided or divided twice, a mean of means "
        "where processes or micro-batches count differently, a parameter that is not reduced over the processes, "
        "clipping that scales small gradients up",
    )
    yield Finding(
        "Gradients", "loss, relative error", *verdict(subject.gather(losses)), "as above: sums, counts and means"
    )
    yield Finding(
        "Gradients",
        "norm, " + ("not clipped" if config.optim.max_grad_norm is None else "clipped at 2 x, 0.5 x it"),
        *verdict(subject.gather(norms)),
        "the norm is one process's, or was taken before the gradients were scaled: clipping then has another bound",
    )
    yield from _membership(subject)
    yield Finding(
        "Updates",
        "learning rate",
        *verdict(subject.gather(rates)),
        "the schedule is ahead of the steps, or of another length: a prepared scheduler steps once per process; set "
        "the rate from the step, and span the steps that the optimizer takes",
    )
    yield Finding(
        "Updates",
        "parameters after each step",
        *verdict(subject.gather(updates)),
        "the optimizer made something else of the gradients than its copy on one process: parameters that it doesn't "
        "have, another learning rate or weight decay, gradients changed after they were clipped",
    )
    yield from _replicas(subject)


def _randomness(subject: Subject, reference: Reference, window: list[MicroBatch]) -> tuple[str, bool]:
    """What the table says of it, and whether the steps are those of training mode."""
    losses = []
    for seed in (0, 1):
        torch.manual_seed(seed)
        batches = [micro_batch.to(subject.device) for micro_batch in window]
        with torch.no_grad():
            losses.append([float(subject.task.loss(reference.model, batch)[0]) for batch in batches])
    if not any(subject.gather(losses[0] != losses[1])):
        return "the model draws none", True
    if subject.config.compile:
        return "switched off (eval mode): compiled code draws other numbers", False
    if subject.is_half and not subject.autocasts_to_bf16:  # its tensors may lie in memory in another order
        return "switched off (eval mode): in fp32, it may draw others", False
    return "on, seeded alike in the run and by hand", True


def _update(reference: Reference, gradients: Mapping[str, Tensor], rate: float) -> None:
    for name, parameter in reference.model.named_parameters():
        parameter.grad = gradients.get(name)
    set_lr(reference.optimizers, rate)
    for optimizer in reference.optimizers:
        optimizer.step()
    reference.model.zero_grad()


def _update_errors(subject: Subject, reference: Reference, before: Mapping[str, Tensor]) -> dict[str, float]:
    """By name, the distance from the reference as a share of how far that has moved."""
    errors, ours = {}, dict(reference.model.named_parameters())
    for name, parameter in subject.bare().named_parameters():
        found, expected = whole(parameter, subject.device), ours[name].detach()
        moved = norm([expected - before[name]])
        errors[name] = norm([found - expected]) / (moved + 1e-6 * norm([expected]) + 1e-30)
    return errors


def _membership(subject: Subject) -> Iterator[Finding]:
    trained = {name: p for name, p in subject.bare().named_parameters() if p.requires_grad}
    times = subject.times_optimized
    absent = [name for name, p in trained.items() if times[id(p)] == 0]
    again = [name for name, p in trained.items() if times[id(p)] > 1]
    says = f"{len(trained) - len(absent)} of {len(trained)} trained parameters"
    yield Finding(
        "Updates",
        "in the optimizer",
        says + (f", not {absent[0]}" if absent else "") + (f", {again[0]} twice" if again else ""),
        "each once",
        not absent and not again,
        "these parameters never change, or change twice: a parameter group is missing or overlaps another one",
    )
    wrong = [name for name, (found, expected) in _groups(subject, trained).items() if found != expected]
    says = f"{len(trained) - len(wrong)} of {len(trained)} as they should"
    yield Finding(
        "Updates",
        "optimizer and weight decay",
        says + (f", not {wrong[0]}" if wrong else ""),
        "matrices decay, vectors not",
        not wrong,
        "a parameter is in the wrong group: biases, norms and other vectors must not decay, and Muon is for matrices "
        "but those of embeddings and the last layer",
    )


def _groups(subject: Subject, trained: Mapping[str, Tensor]) -> dict[str, tuple[object, object]]:
    """By name, the optimizer and the weight decay that a parameter has, and those that it should have: the rule of
    src/optim.py, written a second time."""
    optim = subject.config.optim
    found = {
        id(p): (type(optimizer).__name__, group["weight_decay"])
        for optimizer in subject.optimizers
        for group in optimizer.param_groups
        for p in group["params"]
    }
    layers = list(subject.bare().modules())
    ends = {id(layer.weight) for layer in layers if isinstance(layer, torch.nn.Embedding)}
    ends |= {id(layer.weight) for layer in [layer for layer in layers if isinstance(layer, torch.nn.Linear)][-1:]}
    kinds = {"adamw": "AdamW", "muon": "AdamW", "sgd": "SGD", "adadelta": "Adadelta"}
    groups: dict[str, tuple[object, object]] = {}
    for name, p in trained.items():
        is_muons = optim.name == "muon" and len(p.shape) == 2 and min(p.shape) > 1 and id(p) not in ends
        decay = optim.weight_decay if len(p.shape) > 1 else 0.0
        groups[name] = found.get(id(p)), ("Muon" if is_muons else kinds[optim.name], decay)
    return groups


def _replicas(subject: Subject) -> Iterator[Finding]:
    model, drifted = subject.bare(), subject.drifted()
    buffers = dict(model.named_buffers())
    if subject.accelerator.is_fsdp2:
        yield Finding("Updates", "replicas", "none: each process has its own shard")
    else:
        sums = subject.gather(checksum(list(model.parameters())))
        yield Finding(
            "Updates",
            "replicas, checksum by process",
            ", ".join(sums) if len(set(sums)) > 1 else f"{sums[0]} on all {len(sums)}",
            "the same",
            len(set(sums)) == 1,
            "the processes train different models by now: they started apart, or a gradient is not reduced",
        )
    differing = [name for name in drifted if name in buffers]
    yield Finding(
        "Updates",
        "buffers",
        f"{', '.join(differing[:3])}: differs" if differing else f"{len(buffers)}, none of which drifts apart",
        "the same",
        not differing,
        "a buffer follows each process's own examples, and is not synchronised: evaluation and checkpoints have one "
        "process's. In place of BatchNorm take torch.nn.SyncBatchNorm, or better a norm that looks at one example",
    )
    local = [name for name, m in model.named_modules() if isinstance(m, BATCH_NORMS) and subject.world_size > 1]
    if local:
        says = f"{local[0]} and {len(local) - 1} more: each process's examples alone, so that the curve depends on them"
        yield Finding("Updates", "batch norm", says)
