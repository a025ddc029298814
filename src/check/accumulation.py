"""Check 6, Accumulation: a global batch in micro-batches of another size has the same loss and gradient."""

from collections.abc import Iterator

from torch import Tensor

from src.data.loading import MicroBatch
from src.check.by_hand import by_hand, taken
from src.check.errors import COMPRESSED, NOISE_FACTORS, REORDERED, Worst, off, relative_errors, verdict
from src.check.findings import Finding
from src.check.subject import Reference, Subject


def examine(subject: Subject, reference: Reference) -> Iterator[Finding]:
    """The run's own steps over the first window of the epoch and its last, ragged one: without the update, and in eval
    mode, as dropout would draw other numbers."""
    own = subject.config.micro_batch(subject.world_size)
    sizes = _other_sizes(subject.config.global_batch_size // subject.world_size, own)
    if not sizes:
        yield Finding("Accumulation", "other micro-batches", f"none: a process has {own} example per batch")
        return
    for model in (subject.model, reference.model):
        model.eval()
    reference.copy_from(subject)
    gradients = Worst(COMPRESSED if subject.launch.comm_hook else REORDERED)
    losses = Worst(1e-2 if subject.is_half else REORDERED)
    factor = NOISE_FACTORS["FSDP" if subject.accelerator.is_fsdp2 else "other"]
    for at, others in ((0, sizes[:1]), (subject.schedule.steps_per_epoch - 1, sizes)):
        window = next(subject.windows(at))
        noise = by_hand(subject, reference, window).noise if subject.is_half else {}
        expected, expected_loss = _step(subject, window)
        for size in others:
            found, loss = _step(subject, next(subject.windows(at, size)))
            gradients.add(relative_errors(found, expected), noise, factor)
            losses.add({f"micro-batches of {size}": off(loss, expected_loss)})
    subject.model.train()
    named = " and ".join(map(str, sizes))
    means = (
        "the split into micro-batches changes the result: a mean per micro-batch in place of one sum, or a "
        "last one that is weighted like a full one"
    )
    yield Finding("Accumulation", "randomness (dropout, …)", "switched off (eval mode)")
    for what, worst in (("gradient", gradients), ("loss", losses)):
        yield Finding(
            "Accumulation", f"{what}: {named} in place of {own}", *verdict(subject.gather(worst)), means=means
        )


def _other_sizes(share: int, own: int) -> list[int]:
    """Of micro-batches that a process's share of a global batch can be cut into: the next two smaller ones or, where
    there is none, the next larger one, for which the memory may not be there."""
    sizes = [size for size in range(1, share + 1) if share % size == 0]
    at = sizes.index(own)
    return sizes[:at][::-1][:2] or sizes[at + 1 : at + 2]


def _step(subject: Subject, window: list[MicroBatch]) -> tuple[dict[str, Tensor], float]:
    """The gradients and the mean loss."""
    with taken(subject, is_withheld=True) as found:
        done = subject.step(window, subject.progress(0))
    return found.gradients, done.loss
