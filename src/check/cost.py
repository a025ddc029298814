"""Cost: how often the processes communicate in a step."""

from collections.abc import Iterator
from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode

from src.check.findings import Row, finding
from src.check.subject import Subject

REDUCED_TOO_OFTEN = (
    "gradients are reduced after each micro-batch: DDP has to reduce them after the last one only (no_sync before). It "
    "changes no result, but is slow"
)


class Recorder(TorchDispatchMode):
    """Counts the collectives, including those of the backward pass, DDP and FSDP."""

    collectives = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.collectives += "c10d" in function._schema.name
        return function(*args, **(kwargs or {}))


def check_cost(subject: Subject) -> Iterator[Row]:
    """Take a step of one micro-batch and a step of two, in which DDP must not communicate more often, and FSDP at most
    twice as often. A micro-batch is a single example, so that each process has two of them."""
    subject.run.model.eval()  # BatchNorm needs several examples
    micro_batches = next(subject.micro_batches(0, micro_batch_size=1))
    found = []
    for number in (1, 2):
        with Recorder() as recorder:
            subject.step(subject.at(0), micro_batches[:number])
        found.append(recorder.collectives)
    one, two = found
    most = 2 * one if subject.run.accelerator.is_fsdp2 else one
    yield finding(
        "collectives in a step of two micro-batches", str(two), f"at most {most}", two <= most, REDUCED_TOO_OFTEN
    )
