"""Cost: how often the processes communicate in a step."""

from collections.abc import Iterator

from src.check.findings import Row, finding
from src.check.subject import Subject
from src.training.work import Work

REDUCED_TOO_OFTEN = (
    "gradients are reduced after each micro-batch: DDP has to reduce them after the last one only (no_sync before). It "
    "changes no result, but is slow"
)


def check_cost(subject: Subject) -> Iterator[Row]:
    """Take a step of one micro-batch and a step of two, in which DDP must not communicate more often, and FSDP at most
    twice as often. A micro-batch is a single example, so that each process has two of them."""
    subject.run.model.eval()  # BatchNorm needs several examples
    micro_batches = next(subject.micro_batches(0, micro_batch_size=1))
    found = []
    for number in (1, 2):
        with Work(subject.run.device.type, subject.run.world_size) as work:
            subject.step(subject.at(0), micro_batches[:number])
        found.append(work.counts["collectives within"])
    one, two = found
    most = 2 * one if subject.run.accelerator.is_fsdp2 else one
    says = f"{two}, {work.counts['sent within'] / 1e6:.3f} MB sent"
    yield finding("collectives in a step of two micro-batches", says, f"at most {most}", two <= most, REDUCED_TOO_OFTEN)
