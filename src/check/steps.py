"""Steps and Cost: compare the run's gradients, loss, norm, learning rate and updates with those computed by hand, and
count the collectives of a step."""

from collections import defaultdict
from collections.abc import Iterator
from typing import Any

from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from src.check.context import CheckContext, checksum, named_tensors, unsharded
from src.check.findings import (
    EXACT,
    Errors,
    Row,
    finding,
    gather,
    none_differ,
    norm,
    relative_error,
    relative_errors,
    worst,
)
from src.check.reference import accumulate_gradients, all_reduce, average_gradients
from src.tasks.base import Tensors
from src.training.batches import MicroBatch
from src.training.optim import lr_at
from src.training.progress import mean_loss

REORDERED = 1e-3
"""Bound for relative errors if the forward pass rounds differently too, as with another batch size or compiled. A ReLU
that flips, or another maximum in a pool, causes 1e-4."""
COMPRESSED = 2.0**-7
"""Bound for relative errors if DDP rounds gradients to half precision before reducing them."""
UPDATE = 1e-3
"""Bound for the error of an update, relative to the update plus 1e-4 of its weight, which is rounded by 1e-7."""
MUON_UPDATE = 0.5
"""Muon iterates in bf16: sharding changes the order of sums, and with it a matrix's update by up to 0.16."""
LEARNING_RATE = 1e-9
"""Bound for the error of a learning rate, relative to the peak: in long schedules, consecutive steps hardly differ."""
TINY = 2.0**-100
"""A factor that makes learning rates too small to change any weight; as a power of two it scales exactly."""


def check_steps(context: CheckContext) -> Iterator[Row]:
    """Take an epoch's first step, its second one in micro-batches of another size, and its last, ragged one.

    Before each step, the reference gets the run's weights. It computes its own gradients, but updates with the run's:
    a fault then shows either in the gradients or in the updates.
    """
    run, config = context.run, context.run.config
    own, optim = config.forward_batch_size(run.data_size), config.optim
    # half of the run's own size, or twice as much, or else 1: the first that divides a process's shard
    other = next(n for n in (own // 2, 2 * own, 1) if n and config.global_batch_size // run.data_size % n == 0)
    update_bound = MUON_UPDATE if optim.name == "muon" and run.accelerator.is_fsdp2 else UPDATE
    errors: dict[tuple[str, float], Errors] = defaultdict(dict)  # by what is compared and its bound
    found: Tensors = {}

    def capture(*_: Any) -> None:
        for name, parameter in context.unwrapped.named_parameters():
            if parameter.grad is not None:
                found[name] = unsharded(parameter.grad, run.device).clone()

    hook = run.optimizers[0].register_step_pre_hook(capture)
    for step, size in ((0, own), (1, other), (run.steps_per_epoch - 1, own)):
        where, is_reordered = f"step {step + 1}", getattr(config, "compile", False) or size != own
        exact = REORDERED if is_reordered else EXACT
        bound = COMPRESSED if run.launch.comm_hook else exact
        for model in (run.model, context.reference):
            model.train(not is_reordered and run.cp_size == 1)  # dropout would differ
        context.copy_to_reference()
        expected, expected_loss = _gradients_by_hand(context, context.micro_batches(step, task=context.task))
        expected_norm = norm(expected.values())
        # at the peak learning rate, updates are far above the weights' rounding
        changes: dict[str, Any] = {"schedule": "constant", "warmup_steps": 0}
        if optim.max_grad_norm is not None:  # the first step's norm is below the limit and must be left alone
            limit = changes["max_grad_norm"] = expected_norm * (2.0 if step == 0 else 0.5)
            clip = min(1.0, limit / (expected_norm + 1e-6))
            expected = {name: gradient * clip for name, gradient in expected.items()}
        at = context.at(step, optim=optim.model_copy(update=changes))
        found.clear()
        context.seed()
        result = context.step(at, context.micro_batches(step, micro_batch_size=size))
        errors["gradients", bound] |= relative_errors(found, expected, where)
        errors["loss", exact][where] = relative_error(mean_loss(run.accelerator, result), expected_loss)
        errors["norm", bound][where] = relative_error(result.norm.item(), expected_norm)
        errors["updates", update_bound] |= _update_errors(context, found, where)
    hook.remove()
    errors["learning rate", LEARNING_RATE] = _rate_errors(context)
    for (what, bound), by_name in errors.items():
        yield worst(what, by_name, bound)
    yield _replicas(context)


def check_cost(context: CheckContext) -> Iterator[Row]:
    """Take a step of one micro-batch and a step of two. In the second, DDP must not communicate more, and FSDP at most
    twice as often. Micro-batches are single examples, so that each process has two of them."""
    context.run.model.eval()  # BatchNorm needs several examples
    micro_batches = context.micro_batches(0, micro_batch_size=1)
    with Collectives() as one:
        context.step(context.at(0), micro_batches[:1])
    with Collectives() as two:
        context.step(context.at(0), micro_batches[:2])
    most = 2 * one.count if context.run.accelerator.is_fsdp2 else one.count
    yield finding("collectives in a step of two micro-batches", str(two.count), f"at most {most}", two.count <= most)


class Collectives(TorchDispatchMode):
    """A context that counts this process's collectives, those of DDP and FSDP included.

    Torch's CommDebugMode does so too, but its hooks fail on modules that change their input in place, as a ReLU can.
    """

    count = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = str(function)
        if "c10d" in name and "wait_tensor" not in name:
            self.count += 1
        return function(*args, **(kwargs or {}))


def _gradients_by_hand(context: CheckContext, micro_batches: list[MicroBatch]) -> tuple[Tensors, float]:
    """Return a step's gradients by name, and its loss. Collective."""
    context.seed()
    model, task = context.reference, context.task
    sums = accumulate_gradients(task, model, [batch.data for batch in micro_batches if batch.weight])
    for batch in micro_batches:  # with collectives in the model (SyncBatchNorm), all need equally many forward passes
        if not batch.weight:
            (task.loss(model, batch.data) * 0).backward()
    loss_sum, num_targets = map(all_reduce, sums)
    average_gradients(model, num_targets)
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return gradients, (loss_sum / num_targets.clamp(min=1)).item()


def _update_errors(context: CheckContext, gradients: Tensors, where: str) -> Errors:
    """Update the reference with the run's gradients. Return by name the distance between the run's weights and the
    reference's, relative to how far the latter have moved."""
    reference, before, errors = dict(context.reference.named_parameters()), {}, {}
    for name, parameter in reference.items():
        before[name] = parameter.detach().clone()
        parameter.grad = gradients.get(name)
    for optimizer in context.reference_optimizers:
        optimizer.step()
    context.reference.zero_grad()
    for name, found in context.all_tensors():
        if name in reference:
            expected = reference[name].detach()
            scale = norm([expected - before[name]]) + 1e-4 * norm([expected]) + 1e-30
            errors[f"{name}, {where}"] = norm([found - expected]) / scale
    return errors


def _rate_errors(context: CheckContext) -> Errors:
    """Take steps of one example at the ends of the run and of its first epochs, and halfway. Return the errors of their
    learning rates, relative to the peak."""
    run, per_epoch, errors = context.run, context.run.steps_per_epoch, {}
    optim = run.config.optim.model_copy(update={"lr": TINY * run.config.optim.lr})
    total, length = run.total_steps, run.config.schedule_steps(len(run.train_set))
    one_example = context.micro_batches(0, micro_batch_size=1)[:1]
    run.model.eval()  # BatchNorm needs several
    for step in sorted({0, per_epoch - 1, per_epoch, 2 * per_epoch, total // 2, total - 1} & {*range(total)}):
        context.step(context.at(step, optim=optim), one_example)
        expected = lr_at(step, optim, length, per_epoch)
        rates = [group["lr"] / group.get("lr_scale", 1.0) for of in run.optimizers for group in of.param_groups]
        errors[f"step {step + 1}"] = max(abs(rate - expected) for rate in rates) / optim.lr
    return errors


def _replicas(context: CheckContext) -> Row:
    """Compare the unsharded tensors with those of process 0, except buffers that DDP broadcasts before each forward
    pass."""
    is_broadcast = getattr(context.run.model, "broadcast_buffers", False)
    held = dict(context.unwrapped.named_parameters()) if is_broadcast else named_tensors(context.unwrapped)
    sums = {name: checksum(tensor) for name, tensor in held.items() if not isinstance(tensor, DTensor)}
    first = gather(sums)[0]
    differing = [name for name in sums if sums[name] != first[name]]
    return none_differ("replicas", differing, f"{len(sums)} tensors, the same on all processes")
