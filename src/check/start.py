"""Check 3, Same start: all processes have the weights that one process would begin with."""

from collections.abc import Iterator

import torch

from src.check.findings import Finding
from src.check.subject import Reference, Subject, checksum, share_of, tensors
from src.optim import to_local


def examine(subject: Subject, reference: Reference) -> Iterator[Finding]:
    """Before the first step. Of what is sharded each process compares its shard, so that the wrong one is named."""
    sums = subject.gather(checksum([tensor for _, tensor in tensors(reference.model)]))
    is_same = len(set(sums)) == 1
    yield Finding(
        "Same start",
        "build_model, seeded alike",
        f"checksum {sums[0]} on all processes" if is_same else f"checksums {', '.join(sums)}",
        "the same",
        is_same,
        "build_model makes other weights on each process for the same seed: it draws from something that "
        "accelerate.utils.set_seed doesn't seed",
    )
    ours, theirs, count = dict(tensors(subject.bare())), dict(tensors(reference.model)), 0
    differing = sorted(ours.keys() ^ theirs.keys())
    for name, expected in theirs.items():
        if name not in ours:
            continue
        found = ours[name].detach()
        found, expected = to_local(found), to_local(share_of(expected, found))
        count += 1
        if not torch.equal(found.to(expected.device), expected):
            differing.append(name)
    wrong = [
        f"process {rank}: {names[0]}" + (f" and {len(names) - 1} more differ" if names[1:] else " differs")
        for rank, names in enumerate(subject.gather(differing))
        if names
    ]
    yield Finding(
        "Same start",
        "weights and buffers",
        "; ".join(wrong) or f"{count} tensors, as on one process",
        f"bitwise, for seed {subject.config.seed}",
        not wrong,
        "processes built different models: seed all of them alike before build_model (train.py: set_seed), and only "
        "after it each in its own way, for dropout",
    )
    drawn = subject.gather(subject.random_numbers)
    yield Finding(
        "Same start",
        "random numbers from here on",
        "each process its own" if len(set(drawn)) == len(drawn) else "the same on several processes",
        "each its own",
        len(set(drawn)) == len(drawn),
        "dropout drops the same units on every process, so that a global batch has less variety than on one: add "
        "the process's rank to the seed once the model is built",
    )
