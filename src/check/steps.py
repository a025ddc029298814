"""Checks 4 to 6, Gradients, Updates and Accumulation: steps of the run, each compared with one by hand."""

from collections import defaultdict
from collections.abc import Iterator, Mapping

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from src.check.findings import EXACT, Row, WorstError, finding, gather, norm, relative_error, relative_errors
from src.check.subject import Autocast, Subject, capture_update, whole
from src.data.loading import MicroBatch
from src.optim import Schedule, lr_at, set_lr
from src.progress import mean_loss
from src.reference import all_reduce, average_gradients, backward

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
"""Largest error of an update, as a share of it: a small one is 1e-4 of its weight, whose rounding is 1e-7."""
MUON_UPDATE = 0.5
"""Muon iterates in bf16: the order of a sum, which sharding changes, changes a matrix's update by up to 0.16."""
LEARNING_RATE = 1e-9
"""Largest relative error of a learning rate: early in a warm-up, that of the next step is hardly different."""


def check_steps(subject: Subject) -> Iterator[Row]:
    """Take the first two steps of an epoch and its last, ragged one. Before each, the reference takes over the run's
    weights; it computes its own gradients, but then updates with the run's: each fault shows in one of the two."""
    run, config, reference = subject.run, subject.run.config, subject.reference
    schedule = Schedule(config.steps(subject.steps_per_epoch)[1], subject.steps_per_epoch)  # as the run's should be
    first = subject.micro_batches(0)
    examined = [next(first), next(first), next(subject.micro_batches(subject.steps_per_epoch - 1))]
    steps = [min(step, schedule.steps - 1) for step in (0, 1, schedule.steps // 2)]  # whose learning rate they have
    randomness = _randomness(subject, examined[0][0])
    factor = NOISE_FACTORS["same" if subject.autocasts_to_bf16 else "FSDP" if subject.is_fsdp else "other"]
    exact = REORDERED if config.compile else EXACT
    bound = COMPRESSED if run.launch.comm_hook else exact
    gradients, norms, losses = WorstError(bound), WorstError(bound), WorstError(HALF_LOSS if subject.is_half else exact)
    is_muon_sharded = config.optim.name == "muon" and subject.is_fsdp
    updates, rates = WorstError(MUON_UPDATE if is_muon_sharded else UPDATE), WorstError(LEARNING_RATE)
    for number, (step, micro_batches) in enumerate(zip(steps, examined, strict=True), start=1):
        for model in (run.model, reference):
            model.train(not randomness.startswith("switched off"))
        subject.copy_to_reference()
        expected, expected_loss, noise = _by_hand(subject, micro_batches)
        expected_norm = norm(expected.values())
        max_norm = None
        if config.optim.max_grad_norm is not None:  # one step's norm is below the limit, which must leave it as it is
            max_norm = expected_norm * (2.0 if number == 1 else 0.5)
            for gradient in expected.values():
                gradient *= min(1.0, max_norm / (expected_norm + 1e-6))
        optim = config.optim.model_copy(update={"max_grad_norm": max_norm})
        clipped_run = subject.at(step, config=config.model_copy(update={"optim": optim}))
        subject.seed()
        with capture_update(clipped_run) as found:
            result = subject.step(clipped_run, micro_batches)
        if result.grad_norm is None:
            yield finding("Gradients", "finite", "not finite", "finite", False)
            return
        gradients.add(relative_errors(found, expected), noise, factor)
        losses.add({f"step {number}": relative_error(mean_loss(run.accelerator, result), expected_loss)})
        norms.add({f"step {number}": relative_error(result.grad_norm, expected_norm)}, noise, factor)
        lr = lr_at(step, config.optim, *schedule)
        used = [float(group["lr"]) for optimizer in run.optimizers for group in optimizer.param_groups]
        rates.add({f"step {number}": max(relative_error(rate, lr) for rate in used)})
        updates.add(_update_errors(subject, found, lr))
    run.model.train()
    yield finding("Gradients", "randomness (dropout, …)", randomness)
    yield gradients.finding("Gradients", "largest relative error")
    yield losses.finding("Gradients", "loss, relative error")
    clipping = "not clipped" if config.optim.max_grad_norm is None else "clipped at 2 x, 0.5 x it"
    yield norms.finding("Gradients", f"norm, {clipping}")
    yield from _membership(subject)
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
    task, model = subject.run.task, Autocast(subject.reference, dtype)
    subject.seed()
    loss_sum, num_targets = backward(task, model, [batch.data for batch in micro_batches if batch.weight])
    for batch in micro_batches:  # a model may have collectives (SyncBatchNorm): all need as many forward passes
        if not batch.weight:
            (task.loss(model, batch.data)[0] * 0).backward()
    loss_sum, num_targets = all_reduce(loss_sum), all_reduce(num_targets)
    average_gradients(model, num_targets)
    gradients = {name: p.grad for name, p in subject.reference.named_parameters() if p.grad is not None}
    model.zero_grad()
    return gradients, (loss_sum / num_targets.clamp(min=1)).item()


def _randomness(subject: Subject, micro_batch: MicroBatch) -> str:
    """Return, as text, how the random numbers that the model draws are dealt with."""
    losses = []
    for seed in (0, 1):
        torch.manual_seed(seed)
        with torch.no_grad():
            losses.append(float(subject.run.task.loss(subject.reference, micro_batch.data)[0]))
    if not any(gather(losses[0] != losses[1])):
        return "the model draws none"
    if subject.run.config.compile:
        return "switched off (eval mode): compiled code draws other numbers"
    if subject.is_half and not subject.autocasts_to_bf16:  # its tensors may lie in memory in another order
        return "switched off (eval mode): in fp32, it may draw others"
    return "on, seeded alike in the run and by hand"


def _update_errors(subject: Subject, gradients: Mapping[str, Tensor], lr: float) -> dict[str, float]:
    """Update the reference with the run's gradients. Return by name how far the run's weights are from the reference's,
    as a share of how far those have moved."""
    reference, errors = dict(subject.reference.named_parameters()), {}
    before = {name: parameter.detach().clone() for name, parameter in reference.items()}
    for name, parameter in reference.items():
        parameter.grad = gradients.get(name)
    set_lr(subject.reference_optimizers, lr)
    for optimizer in subject.reference_optimizers:
        optimizer.step()
    subject.reference.zero_grad()
    for name, parameter in subject.unwrapped.named_parameters():
        found, expected = whole(parameter, subject.run.device), reference[name].detach()
        moved = norm([expected - before[name]])
        errors[name] = norm([found - expected]) / (moved + 1e-6 * norm([expected]) + 1e-30)
    return errors


def _membership(subject: Subject) -> Iterator[Row]:
    """Compare the parameter groups with the rule of src/optim.py, written a second time."""
    optim, layers = subject.run.config.optim, list(subject.unwrapped.modules())
    groups = defaultdict(list)  # by parameter
    for optimizer in subject.run.optimizers:
        for group in optimizer.param_groups:
            for p in group["params"]:
                groups[p].append((type(optimizer).__name__.lower(), group["weight_decay"]))
    ends = {layer.weight for layer in layers if isinstance(layer, nn.Embedding)}
    ends |= {layer.weight for layer in [layer for layer in layers if isinstance(layer, nn.Linear)][-1:]}
    trained = {name: p for name, p in subject.unwrapped.named_parameters() if p.requires_grad}
    absent = [name for name, p in trained.items() if not groups[p]]
    again = [name for name, p in trained.items() if len(groups[p]) > 1]
    wrong = []
    for name, p in trained.items():
        is_muons = p.ndim == 2 and min(p.shape) > 1 and p not in ends
        kind = "adamw" if optim.name == "muon" and not is_muons else optim.name
        wrong += [name] if (kind, optim.weight_decay if p.ndim > 1 else 0.0) not in groups[p] else []
    measured = f"{len(trained) - len(absent)} of {len(trained)} trained parameters"
    measured += (f", not {absent[0]}" if absent else "") + (f", {again[0]} twice" if again else "")
    yield finding("Updates", "in the optimizer", measured, "each once", not absent and not again)
    measured = f"{len(trained) - len(wrong)} of {len(trained)} as they should" + (f", not {wrong[0]}" if wrong else "")
    yield finding("Updates", "optimizer and weight decay", measured, "matrices decay, vectors not", not wrong)


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
    """Take the first step of the epoch and its last, ragged one in micro-batches of other sizes: with a learning rate
    of 0, which train_step takes from optim.lr, and in eval mode, as dropout would draw other numbers."""
    run = subject.run
    share, own = run.config.global_batch_size // run.world_size, run.config.micro_batch(run.world_size)
    divisors = [size for size in range(1, share + 1) if share % size == 0]
    at = divisors.index(own)  # the next two smaller ones, else the next larger one, which may not fit into memory
    sizes = divisors[:at][::-1][:2] or divisors[at + 1 : at + 2]
    if not sizes:
        yield finding("Accumulation", "other micro-batches", f"none: a process has {own} example per batch")
        return
    for model in (run.model, subject.reference):
        model.eval()
    subject.copy_to_reference()
    gradients = WorstError(COMPRESSED if run.launch.comm_hook else REORDERED)
    losses = WorstError(HALF_LOSS if subject.is_half else REORDERED)
    factor = NOISE_FACTORS["FSDP" if subject.is_fsdp else "other"]
    at_zero_lr = run.config.model_copy(update={"optim": run.config.optim.model_copy(update={"lr": 0.0})})
    for step, others in ((0, sizes[:1]), (subject.steps_per_epoch - 1, sizes)):
        noise = _by_hand(subject, next(subject.micro_batches(step)))[2] if subject.is_half else {}
        for size in (own, *others):
            again = subject.at(0, config=at_zero_lr)
            with capture_update(again) as found:
                loss = mean_loss(run.accelerator, subject.step(again, next(subject.micro_batches(step, size))))
            if size == own:
                expected, expected_loss = found, loss
                continue
            gradients.add(relative_errors(found, expected), noise, factor)
            losses.add({f"micro-batches of {size}": relative_error(loss, expected_loss)})
    run.model.train()
    yield finding("Accumulation", "randomness (dropout, …)", "switched off (eval mode)")
    split = f"{' and '.join(map(str, sizes))} in place of {own}"
    yield gradients.finding("Accumulation", f"gradient: {split}")
    yield losses.finding("Accumulation", f"loss: {split}")
