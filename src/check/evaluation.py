"""Check 7, Evaluation: the run's own gives what one process finds over the same examples."""

import math
from collections.abc import Iterator

from torch.utils.data import Subset

from src.check.errors import EXACT
from src.check.findings import Finding
from src.check.subject import Reference, Subject
from src.reference import evaluate

MOST = 10_000
"""Examples that every process looks at, all of them."""
HALF = 2e-2
"""What a metric may differ by in half precision, where examples near the boundary change sides."""


def examine(subject: Subject, reference: Reference) -> Iterator[Finding]:
    """All processes compute the whole set by hand: none may wait for the others in a collective of the model."""
    dataset, count = subject.eval_set, len(subject.eval_set)
    if count > MOST:
        dataset = Subset(subject.eval_set, range(MOST - 1))  # type: ignore[arg-type]  # one less: a ragged end
    reference.copy_from(subject)
    size = 4 * subject.config.micro_batch(subject.world_size)  # nothing is kept for a backward pass
    config = subject.config.model_copy(update={"micro_batch_size": size})
    found, _ = subject.evaluate(subject.accelerator, config, subject.model, dataset, subject.stop)
    with reference.autocast(subject.half):
        expected = subject.gather(evaluate(subject.task, reference.model, dataset, size))[0]
    of = f"examples (the first of {count:,})" if count > MOST else "examples"
    yield Finding(
        "Evaluation",
        of,
        f"{found['eval/examples']:,}",
        f"{len(dataset):,}",
        found["eval/examples"] == len(dataset),
        "examples are counted twice, as padding, or left out",
    )
    bound = HALF if subject.is_half else EXACT
    for name in sorted(expected.keys() - {"examples"}):
        here, there = found.get(f"eval/{name}", float("nan")), expected[name]
        distance = 0.0 if math.isnan(here) and math.isnan(there) else abs(here - there) / max(1.0, abs(there))
        yield Finding(
            "Evaluation",
            name,
            f"{here:.6g}, by hand {there:.6g}",
            f"within {bound:g}",
            here == there or distance <= bound,
            "the metric is a mean of each process's, or counts padding: gather each example once, in order, and "
            "compute it from all of them",
        )
