"""Checks 4 to 6, Gradients, Updates and Accumulation: steps of the run, each compared with one by hand."""

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from src.check.findings import EXACT, Row, WorstError, finding, gather, norm, relative_error, relative_errors
from src.check.reference import all_reduce, average_gradients, backward
from src.check.subject import Subject, autocast, capture_update, whole
from src.checkpoint.rng import random_state
from src.tasks.returned import returned
from src.training.batches import MicroBatch
from src.training.optim import lr_at
from src.training.progress import mean_loss

REORDERED = 1e-3
"""Largest relative error in fp32 if the forward pass rounds differently too, in a batch of another size or compiled: a
ReLU that flips, or another maximum in a pool, is worth 1e-4."""
COMPRESSED = 2.0**-7
"""The same if DDP rounds gradients to half precision on their way to the other processes."""
HALF_LOSS = 1e-2
"""The same for a loss in half precision."""
NOISE_FACTORS = {"same": 2.0, "other": 4.0, "FSDP": 16.0}
"""How many times the error that autocast to bf16 makes in one unwrapped model an error in half precision may be: under
the same autocast; under another, or in other micro-batches; under FSDP, which computes all in half precision."""
UPDATE = 1e-3
"""Largest error of an update, as a share of it and of 1e-4 of its weight, whose rounding is 1e-7."""
MUON_UPDATE = 0.5
"""Muon iterates in bf16: the order of a sum, which sharding changes, changes a matrix's update by up to 0.16."""
LEARNING_RATE = 1e-9
"""Largest error of a learning rate, as a share of the peak: in a long schedule, that of the next step is close."""
TINY = 2.0**-100
"""A factor that makes learning rates so small that no weight moves, and scales them exactly."""
IMPLEMENTATION = {"params", "lr", "foreach", "fused", "capturable", "differentiable"}
"""What may differ in a parameter group without another result; the learning rate is looked at by itself."""


def check_steps(subject: Subject) -> Iterator[Row]:
    """Take the first two steps of an epoch and its last, ragged one. Before each, the reference takes over the run's
    weights; it computes its own gradients, but then updates with the run's: each fault shows in one of the two."""
    run, config, reference = subject.run, subject.run.config, subject.reference
    sizes = {0: None, 1: _other_size(subject), subject.steps_per_epoch - 1: None}  # None: the run's own
    examined = {step: next(subject.micro_batches(step, size)) for step, size in sizes.items()}
    randomness = _randomness(subject, examined[0][0])
    factor = NOISE_FACTORS["same" if subject.autocasts_to_bf16 else "FSDP" if subject.is_fsdp else "other"]
    exact = REORDERED if config.compile else EXACT
    bound = COMPRESSED if run.launch.comm_hook else exact
    gradients, norms, losses = WorstError(bound), WorstError(bound), WorstError(HALF_LOSS if subject.is_half else exact)
    is_muon_sharded = config.optim.name == "muon" and subject.is_fsdp
    updates = WorstError(MUON_UPDATE if is_muon_sharded else UPDATE)
    at_the_peak = {"schedule": "constant", "warmup_steps": 0}  # where an update stands out from the weights' rounding
    for step, micro_batches in examined.items():
        for model in (run.model, reference):
            model.train(not randomness.startswith("switched off"))
        subject.copy_to_reference()
        expected, expected_loss, noise = _by_hand(subject, micro_batches)
        expected_norm = norm(expected.values())
        max_norm = None
        if config.optim.max_grad_norm is not None:  # one step's norm is below the limit, which must leave it as it is
            max_norm = expected_norm * (2.0 if step == 0 else 0.5)
            for gradient in expected.values():
                gradient *= min(1.0, max_norm / (expected_norm + 1e-6))
        optim = config.optim.model_copy(update={"max_grad_norm": max_norm, **at_the_peak})
        clipped_run = subject.at(step, config=config.model_copy(update={"optim": optim}))
        subject.seed()
        with capture_update(clipped_run) as found:
            result = subject.step(clipped_run, micro_batches)
        if result.grad_norm is None:
            yield finding("Gradients", "finite", "not finite", "finite", False)
            return
        gradients.add(relative_errors(found, expected), noise, factor)
        losses.add({f"step {step + 1}": relative_error(mean_loss(run.accelerator, result), expected_loss)})
        norms.add({f"step {step + 1}": relative_error(result.grad_norm, expected_norm)}, noise, factor)
        updates.add(_update_errors(subject, found))
    rates = _rates(subject)
    run.model.train()
    yield finding("Gradients", "randomness (dropout, …)", randomness)
    yield gradients.finding("Gradients", "largest relative error")
    yield losses.finding("Gradients", "loss, relative error")
    clipping = "not clipped" if config.optim.max_grad_norm is None else "clipped at 2 x, 0.5 x it"
    yield norms.finding("Gradients", f"norm, {clipping}")
    yield from _settings(subject)
    yield rates.finding("Updates", "learning rate")
    yield updates.finding("Updates", "parameters after each step")
    yield from _replicas(subject)


def _by_hand(subject: Subject, micro_batches: list[MicroBatch]) -> tuple[dict[str, Tensor], float, dict[str, float]]:
    """Return a step's gradients, by name, and loss, under autocast if the run applies the same to the same operators,
    else in fp32; and the relative errors that bf16 makes in the gradients, empty in fp32. Collective."""
    exact, exact_loss = _gradients_by_hand(subject, micro_batches, None)
    if not subject.is_half:
        return exact, exact_loss, {}
    rough, rough_loss = _gradients_by_hand(subject, micro_batches, torch.bfloat16)  # fp16 would need its loss scaled
    noise = relative_errors(rough, exact)
    return (rough, rough_loss, noise) if subject.autocasts_to_bf16 else (exact, exact_loss, noise)


def _gradients_by_hand(
    subject: Subject, micro_batches: list[MicroBatch], dtype: torch.dtype | None
) -> tuple[dict[str, Tensor], float]:
    subject.seed()
    with autocast(subject.reference, dtype) as model:
        own = [batch.data for batch in micro_batches if batch.weight]
        loss_sum, num_targets = backward(subject.run.task, model, own)
        for batch in micro_batches:  # a model may have collectives (SyncBatchNorm): all need as many forward passes
            if not batch.weight:
                (subject.run.task.loss(model, batch.data)[0] * 0).backward()
    loss_sum, num_targets = all_reduce(loss_sum), all_reduce(num_targets)
    average_gradients(model, num_targets)
    gradients = {name: p.grad for name, p in subject.reference.named_parameters() if p.grad is not None}
    model.zero_grad()
    return gradients, (loss_sum / num_targets.clamp(min=1)).item()


def _randomness(subject: Subject, micro_batch: MicroBatch) -> str:
    """Return, as text, how the random numbers that the model draws are dealt with."""
    device = subject.run.device
    before = random_state(device)
    with torch.no_grad():
        returned(subject.run.task, "loss", subject.reference, micro_batch.data)
    if not any(gather(random_state(device) != before)):
        return "the model draws none"
    if subject.run.config.compile:
        return "switched off (eval mode): compiled code draws other numbers"
    if subject.is_half and not subject.autocasts_to_bf16:  # its tensors may lie in memory in another order
        return "switched off (eval mode): in fp32, it may draw others"
    return "on, seeded alike in the run and by hand"


def _update_errors(subject: Subject, gradients: Mapping[str, Tensor]) -> dict[str, float]:
    """Update the reference with the run's gradients. Return by name how far the run's weights are from the reference's,
    as a share of how far those have moved."""
    reference, errors = dict(subject.reference.named_parameters()), {}
    before = {name: parameter.detach().clone() for name, parameter in reference.items()}
    for name, parameter in reference.items():
        parameter.grad = gradients.get(name)
    for optimizer in subject.reference_optimizers:
        optimizer.step()
    subject.reference.zero_grad()
    for name, parameter in subject.unwrapped.named_parameters():
        found, expected = whole(parameter, subject.run.device), reference[name].detach()
        moved = norm([expected - before[name]])
        errors[name] = norm([found - expected]) / (moved + 1e-4 * norm([expected]) + 1e-30)
    return errors


def _rates(subject: Subject) -> WorstError:
    """Return the errors of the learning rate, as shares of the peak, in steps of one example: at the edges of the run
    and of its first epochs, and halfway. An error is infinite where the optimizers don't step."""
    run, per_epoch, errors, used = subject.run, subject.steps_per_epoch, WorstError(LEARNING_RATE), [0.0]
    optim = run.config.optim.model_copy(update={"lr": TINY * run.config.optim.lr})
    config, (total, length) = run.config.model_copy(update={"optim": optim}), run.config.steps(per_epoch)

    def note(*_: Any) -> None:
        used[:] = [group["lr"] for optimizer in run.optimizers for group in optimizer.param_groups]

    hook, one_example = run.optimizers[-1].register_step_pre_hook(note), next(subject.micro_batches(0, 1))[:1]
    run.model.eval()  # BatchNorm needs several
    edges = {0, 1, per_epoch - 1, per_epoch, 2 * per_epoch - 1, 2 * per_epoch, 3 * per_epoch - 1, total // 2, total - 1}
    for step in sorted(edges & {*range(total)}):
        used[:] = [math.inf]
        subject.step(subject.at(step, config=config), one_example)
        expected = lr_at(step, optim, length, per_epoch)
        errors.add({f"step {step + 1}": max(abs(rate - expected) for rate in used) / optim.lr})
    hook.remove()
    return errors


def _settings(subject: Subject) -> Iterator[Row]:
    """Compare what the optimizers have with the rule of training/optim.py, written a second time: what has a name in
    optim is as it says, and all else as torch has it."""
    optim, layers = subject.run.config.optim, list(subject.unwrapped.modules())
    ends = {layer.weight for layer in layers if isinstance(layer, nn.Embedding)}
    ends |= {layer.weight for layer in [layer for layer in layers if isinstance(layer, nn.Linear)][-1:]}
    differing = defaultdict(list)  # for each parameter, what is wrong with each optimizer that has it
    for optimizer in subject.run.optimizers:
        for group in optimizer.param_groups:
            kind: Any = type(optimizer)
            given = {"optimizer": kind.__name__.lower(), **group}
            rule = {**kind(group["params"]).defaults, "adjust_lr_fn": "match_rms_adamw"}
            rule = {name: getattr(optim, name, rule[name]) for name in given.keys() & rule.keys() - IMPLEMENTATION}
            for p in group["params"]:
                is_muons = p.ndim == 2 and min(p.shape) > 1 and p not in ends
                rule["optimizer"] = "adamw" if optim.name == "muon" and not is_muons else optim.name
                rule["weight_decay"] = optim.weight_decay if p.ndim > 1 else 0.0
                wrong = (f"{name} {given[name]}, not {value}" for name, value in rule.items() if given[name] != value)
                differing[p].append(", ".join(wrong))
    trained = [(name, differing[p]) for name, p in subject.unwrapped.named_parameters() if p.requires_grad]
    bad = [f"{name}: " + (of[0] if len(of) == 1 else f"in {len(of)} groups") for name, of in trained if of != [""]]
    measured = f"{len(trained) - len(bad)} of {len(trained)} as they should" + (f", not {bad[0]}" if bad else "")
    yield finding("Updates", "optimizer and its settings", measured, "as in optim, vectors don't decay", not bad)


def _replicas(subject: Subject) -> Iterator[Row]:
    model, drifted = subject.unwrapped, subject.drifted()
    replicas = {name for name, p in model.named_parameters() if not isinstance(p, DTensor)}
    for what, names in (("replicas", replicas), ("buffers", dict(model.named_buffers()))):
        differing = ", ".join([name for name in drifted if name in names][:3])
        measured = f"{differing}: differs" if differing else f"{len(names)}, none drifts apart"
        yield finding("Updates", what, measured, "the same" if names else "", not differing)
    kinds = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
    local = [name for name, module in model.named_modules() if isinstance(module, kinds)]
    if local and subject.run.world_size > 1:
        says = f"{local[0]} and {len(local) - 1} more: each process's examples alone, so that the curve depends on them"
        yield finding("Updates", "batch norm", says)


def check_accumulation(subject: Subject) -> Iterator[Row]:
    """Take the first step of the epoch and its last, ragged one in micro-batches of another size: by hand, as the run's
    steps were compared with those by hand; in eval mode, as dropout would draw other numbers."""
    own, other = subject.run.config.micro_batch(subject.run.world_size), _other_size(subject)
    if other is None:
        yield finding("Accumulation", "other micro-batches", f"none: a process has {own} example per batch")
        return
    subject.copy_to_reference()
    subject.reference.eval()
    gradients, losses = WorstError(REORDERED), WorstError(REORDERED)
    for step in (0, subject.steps_per_epoch - 1):
        expected, expected_loss = _gradients_by_hand(subject, next(subject.micro_batches(step)), None)
        found, loss = _gradients_by_hand(subject, next(subject.micro_batches(step, other)), None)
        gradients.add(relative_errors(found, expected))
        losses.add({f"step {step + 1}": relative_error(loss, expected_loss)})
    subject.reference.train()
    yield gradients.finding("Accumulation", f"gradient: {other} in place of {own}")
    yield losses.finding("Accumulation", f"loss: {other} in place of {own}")


def _other_size(subject: Subject) -> int | None:
    """Return the next smaller size of micro-batches, else the next larger one; None: there is no other."""
    config, world_size = subject.run.config, subject.run.world_size
    share, own = config.global_batch_size // world_size, config.micro_batch(world_size)
    sizes = [size for size in range(1, share + 1) if share % size == 0 and size != own]
    return max((size for size in sizes if size < own), default=min(sizes, default=None))
