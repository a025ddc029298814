"""Check 7, Evaluation: the run's own gives what one process finds over the same examples."""

import math
from collections.abc import Iterator

from torch.utils.data import Subset

from src.data.loading import evaluation_batches
from src.check.data import Positions, ReadsPositions
from src.check.errors import EXACT
from src.check.findings import Finding
from src.check.subject import Reference, Subject
from src.reference import evaluate

MOST = 9_999
"""Examples that every process looks at, all of them."""
HALF = 2e-2
"""What a metric may differ by in half precision, where examples near the boundary change sides."""
FEW = 3
"""So many of them may, of a small set."""


def examine(subject: Subject, reference: Reference) -> Iterator[Finding]:
    """With noise on the weights. All processes compute the whole set by hand: none may wait for the others in a
    collective of the model."""
    dataset, count, world_size = subject.eval_set, len(subject.eval_set), subject.world_size
    size = 4 * subject.config.micro_batch(world_size)  # nothing is kept for a backward pass
    size = max(1, min(size, count // (3 * world_size)))  # several batches
    length = min(count, MOST)
    length -= (length - 1) % (size * world_size)  # the last batch is one example: the others compute on a stand-in
    if length < count:
        dataset = Subset(subject.eval_set, range(length))  # type: ignore[arg-type]
    config = subject.config.model_copy(update={"micro_batch_size": size})
    positions = config.model_copy(update={"task": ReadsPositions(subject)})
    batches = evaluation_batches(subject.accelerator, positions, Positions(length))
    counts = subject.gather(sum(1 for _ in batches))
    is_same = len(set(counts)) == 1 and counts[0] > 0
    yield Finding(
        "Evaluation",
        "batches",
        f"{counts[0]} on each process" if is_same else f"{', '.join(map(str, counts))} by process",
        "as many on each",
        is_same,
        "a process has fewer batches than others, or none: where it has no example left, it has to compute on a "
        "stand-in of weight 0, as the others wait for it",
    )
    if not is_same:
        return
    reference.copy_from(subject)
    with reference.perturbed(), subject.holding(reference):
        subject.model.train()
        found, _ = subject.evaluate(subject.accelerator, config, subject.model, dataset, subject.stop)
        is_training = subject.model.training
        with reference.autocast(subject.half):
            expected = subject.gather(evaluate(subject.task, reference.model, dataset, size))[0]
    of = "examples" if length == count else f"examples (the first of {count:,})"
    yield Finding(
        "Evaluation",
        of,
        f"{found['eval/examples']:,}",
        f"{len(dataset):,}",
        found["eval/examples"] == len(dataset),
        "examples are counted twice, as padding, or left out",
    )
    yield Finding(
        "Evaluation",
        "mode afterwards",
        "training" if is_training else "evaluation",
        "training",
        is_training,
        "dropout and the like stay off for the rest of the run: evaluate() must end with model.train()",
    )
    for name in sorted(expected.keys() - {"examples"}):
        bound = max(HALF, 0 if name == "loss" else FEW / len(dataset)) if subject.is_half else EXACT
        here, there = found.get(f"eval/{name}", float("nan")), expected[name]
        distance = 0.0 if math.isnan(here) and math.isnan(there) else abs(here - there) / max(1.0, abs(there))
        yield Finding(
            "Evaluation",
            name,
            f"{here:.6g}, by hand {there:.6g}",
            f"within {bound:g}",
            here == there or distance <= bound,
            "a mean of each process's or each batch's mean, or counted padding: sum and count over all examples, or "
            "gather each once, in order, and compute it from all of them",
        )
