"""Checks 4 to 6, Gradients, Updates and Accumulation: steps of the run, each compared with one by hand."""

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from src.check.findings import EXACT, Row, WorstError, finding, norm, relative_error, relative_errors
from src.check.reference import all_reduce, average_gradients, backward
from src.check.subject import Subject, capture_update, whole
from src.training.batches import MicroBatch
from src.training.optim import lr_at
from src.training.progress import mean_loss

REORDERED = 1e-3
"""Largest relative error if the forward pass rounds differently too, in a batch of another size or compiled: a
ReLU that flips, or another maximum in a pool, is worth 1e-4."""
COMPRESSED = 2.0**-7
"""The same if DDP rounds gradients to half precision on their way to the other processes."""
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


NOT_THE_MEAN = (
    "not the gradient of the whole batch's mean loss: a sum that was not divided or divided twice, a mean of means "
    "where processes or micro-batches count differently, a parameter that is not reduced over the processes, clipping "
    "that scales small gradients up"
)
WRONG_RATE = (
    "the schedule is ahead of the steps, of another form or length, or a step is left out: a prepared scheduler steps "
    "once per process; set the rate from the step, over as many steps as the optimizer takes"
)
WRONG_UPDATE = (
    "the optimizer did something else with the gradients than its copy on one process: parameters that it doesn't "
    "have, another learning rate or weight decay, gradients changed after they were clipped"
)
WRONG_SETTING = (
    "a setting of optim is ignored, or a parameter is in no group, two or a wrong one: biases, norms and other vectors "
    "must not decay, and Muon is for matrices except those of embeddings and the last layer"
)
DRIFT = {
    "replicas": "the processes train different models by now: they started apart, or a gradient is not reduced",
    "buffers": "a buffer follows each process's own examples, and is not synchronised: evaluation and checkpoints have "
    "one process's. Use torch.nn.SyncBatchNorm for BatchNorm, or better a norm that looks at one example",
}
SEEDED = "on, seeded alike in the run and by hand"
OTHER_NORM = "the norm is one process's, or was taken before the gradients were scaled: clipping goes by it"
SIZE_MATTERS = (
    "micro-batches change the result: Task.loss returns a mean in place of the sum over its targets, or of other "
    "targets than count_targets counts, or an example's loss depends on those beside it"
)


def check_steps(subject: Subject) -> Iterator[Row]:
    """Take the first two steps of an epoch and its last, ragged one. Before each, the reference takes over the run's
    weights; it computes its own gradients, but then updates with the run's: each fault shows in one of the two."""
    run, config, own = subject.run, subject.run.config, subject.run.config.micro_batch(subject.run.world_size)
    sizes = {0: own, 1: _other_size(subject) or own, subject.steps_per_epoch - 1: own}
    examined = {step: next(subject.micro_batches(step, micro_batch_size=size)) for step, size in sizes.items()}
    exact = REORDERED if config.compile else EXACT
    bound = COMPRESSED if run.launch.comm_hook else exact
    gradients, norms, losses = WorstError(bound), WorstError(bound), WorstError(exact)
    is_muon_sharded = config.optim.name == "muon" and subject.is_fsdp
    updates = WorstError(MUON_UPDATE if is_muon_sharded else UPDATE)
    for step, micro_batches in examined.items():
        for model in (run.model, subject.reference):
            model.train(not config.compile)  # compiled code draws other numbers than the reference
        subject.copy_to_reference()
        expected, expected_loss = _gradients_by_hand(subject, micro_batches)
        expected_norm = norm(expected.values())
        # at the schedule's peak, an update stands out from the weights' rounding
        changes: dict[str, Any] = {"schedule": "constant", "warmup_steps": 0}
        if config.optim.max_grad_norm is not None:  # one step's norm is below the limit, which must leave it alone
            changes["max_grad_norm"] = expected_norm * (2.0 if step == 0 else 0.5)
            _clip(expected, expected_norm, changes["max_grad_norm"])
        clipped_run = subject.at(step, optim=config.optim.model_copy(update=changes))
        subject.seed()
        with capture_update(clipped_run) as found:
            result = subject.step(clipped_run, micro_batches)
        if result.grad_norm is None:
            yield finding("finite", "not finite", "finite", False, "the loss or its gradient overflows")
            return
        gradients.add(relative_errors(found, expected))
        losses.add({f"step {step + 1}": relative_error(mean_loss(run.accelerator, result), expected_loss)})
        norms.add({f"step {step + 1}": relative_error(result.grad_norm, expected_norm)})
        updates.add(_update_errors(subject, found))
    rates = _rates(subject)
    run.model.train()
    dropout = "switched off (eval mode): compiled code draws other numbers" if config.compile else SEEDED
    yield finding("randomness (dropout, …)", dropout)
    yield gradients.finding("largest relative error", NOT_THE_MEAN)
    yield losses.finding("loss, relative error", "as above: sums, counts and means")
    clipping = "not clipped" if config.optim.max_grad_norm is None else "clipped at 2 x, 0.5 x it"
    yield norms.finding(f"norm, {clipping}", OTHER_NORM)
    yield _settings(subject)
    yield rates.finding("learning rate", WRONG_RATE, "Updates")
    yield updates.finding("parameters after each step", WRONG_UPDATE, "Updates")
    yield from _replicas(subject)


def _clip(gradients: dict[str, Tensor], norm: float, max_norm: float) -> None:
    for gradient in gradients.values():
        gradient *= min(1.0, max_norm / (norm + 1e-6))


def _gradients_by_hand(subject: Subject, micro_batches: list[MicroBatch]) -> tuple[dict[str, Tensor], float]:
    """Return a step's gradients, by name, and its loss. Collective."""
    subject.seed()
    model, task = subject.reference, subject.run.task
    sums = backward(task, model, [batch.data for batch in micro_batches if batch.weight])
    for batch in micro_batches:  # a model may have collectives (SyncBatchNorm): all need as many forward passes
        if not batch.weight:
            (task.loss(model, batch.data) * 0).backward()
    loss_sum, num_targets = map(all_reduce, sums)
    average_gradients(model, num_targets)
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return gradients, (loss_sum / num_targets.clamp(min=1)).item()


def _update_errors(subject: Subject, gradients: Mapping[str, Tensor]) -> dict[str, float]:
    """Update the reference with the run's gradients. Return by name how far the run's weights are from the reference's,
    as a share of how far those have moved."""
    reference, before, errors = dict(subject.reference.named_parameters()), {}, {}
    for name, parameter in reference.items():
        before[name] = parameter.detach().clone()
        parameter.grad = gradients.get(name)
    for optimizer in subject.reference_optimizers:
        optimizer.step()
    subject.reference.zero_grad()
    for name, parameter in subject.unwrapped.named_parameters():
        found, expected = whole(parameter, subject.run.device), reference[name].detach()
        scale = norm([expected - before[name]]) + 1e-4 * norm([expected]) + 1e-30
        errors[name] = norm([found - expected]) / scale
    return errors


def _rates(subject: Subject) -> WorstError:
    """Return the errors of the learning rate, as shares of the peak, in steps of one example: at the edges of the run
    and of its first epochs, and halfway. An error is infinite where the optimizers don't step."""
    run, per_epoch, errors = subject.run, subject.steps_per_epoch, WorstError(LEARNING_RATE)
    optim = run.config.optim.model_copy(update={"lr": TINY * run.config.optim.lr})
    total, length = run.config.steps(per_epoch)
    used: list[float] = []

    def note(*_: Any) -> None:
        used.extend(group["lr"] for optimizer in run.optimizers for group in optimizer.param_groups)

    hook = run.optimizers[-1].register_step_pre_hook(note)
    one_example = next(subject.micro_batches(0, micro_batch_size=1))[:1]
    run.model.eval()  # BatchNorm needs several
    edges = {0, 1, per_epoch - 1, per_epoch, 2 * per_epoch - 1, 2 * per_epoch, 3 * per_epoch - 1, total // 2, total - 1}
    for step in sorted(edges & {*range(total)}):
        used.clear()
        subject.step(subject.at(step, optim=optim), one_example)
        expected = lr_at(step, optim, length, per_epoch)
        worst = max((abs(rate - expected) for rate in used), default=math.inf)
        errors.add({f"step {step + 1}": worst / optim.lr})
    hook.remove()
    return errors


def _settings(subject: Subject) -> Row:
    """Compare what the optimizers have with the rule of training/optim.py, written a second time: what has a name in
    optim is as it says, and all else as torch has it."""
    optim = subject.run.config.optim
    layers = list(subject.unwrapped.modules())
    linear = [layer.weight for layer in layers if isinstance(layer, nn.Linear)]
    ends = {layer.weight for layer in layers if isinstance(layer, nn.Embedding)} | {*linear[-1:]}  # not for Muon
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
    measured = f"{len(trained) - len(bad)} of {len(trained)} as they should"
    if bad:
        measured += f", not {bad[0]}"
    bound = "as in optim, vectors don't decay"
    return finding("optimizer and its settings", measured, bound, not bad, WRONG_SETTING, "Updates")


def _replicas(subject: Subject) -> Iterator[Row]:
    model, drifted = subject.unwrapped, subject.drifted()
    replicas = {name for name, p in model.named_parameters() if not isinstance(p, DTensor)}
    for what, names in (("replicas", replicas), ("buffers", dict(model.named_buffers()))):
        differing = [name for name in drifted if name in names]
        measured = f"{len(names)}, none drifts apart"
        if differing:
            measured = f"{', '.join(differing[:3])}: differs"
        yield finding(what, measured, "the same" if names else "", not differing, DRIFT[what], "Updates")
    kinds = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
    local = [name for name, module in model.named_modules() if isinstance(module, kinds)]
    if local and subject.run.world_size > 1:
        says = f"{local[0]} and {len(local) - 1} more: each process's examples alone, so that the curve depends on them"
        yield finding("batch norm", says, check="Updates")


def check_accumulation(subject: Subject) -> Iterator[Row]:
    """Take the first step of the epoch and its last, ragged one in micro-batches of another size: by hand, as the run's
    steps were compared with those by hand; in eval mode, as dropout would draw other numbers."""
    own, other = subject.run.config.micro_batch(subject.run.world_size), _other_size(subject)
    if other is None:
        yield finding("other micro-batches", f"none: a process has {own} example per batch")
        return
    subject.copy_to_reference()
    subject.reference.eval()
    gradients, losses = WorstError(REORDERED), WorstError(REORDERED)
    for step in (0, subject.steps_per_epoch - 1):
        expected, expected_loss = _gradients_by_hand(subject, next(subject.micro_batches(step)))
        found, loss = _gradients_by_hand(subject, next(subject.micro_batches(step, micro_batch_size=other)))
        gradients.add(relative_errors(found, expected))
        losses.add({f"step {step + 1}": relative_error(loss, expected_loss)})
    subject.reference.train()
    yield gradients.finding(f"gradient: {other} in place of {own}", SIZE_MATTERS)
    yield losses.finding(f"loss: {other} in place of {own}", SIZE_MATTERS)


def _other_size(subject: Subject) -> int | None:
    """Return another size of micro-batches, the next smaller one if there is one; None: there is no other."""
    config, world_size = subject.run.config, subject.run.world_size
    share, own = config.global_batch_size // world_size, config.micro_batch(world_size)
    sizes = [size for size in range(1, share + 1) if share % size == 0 and size != own]
    return max((size for size in sizes if size < own), default=min(sizes, default=None))
