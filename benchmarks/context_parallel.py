"""Measure the cost of sharing each sequence between two processes (fsdp_cp.yaml) against one each (fsdp.yaml).

    python -m benchmarks.context_parallel

The Llama of benchmarks/language.py, 2 sequences of 2,048 tokens per step, on 2 processes of a thread each, in fp32, by
turns of 2 steps. Each process computes as many tokens at once: a whole sequence, or its half of both. The same curve,
asserted, so the same work; what is more are two all-to-alls per block, forward and backward, through the memory of this
machine.
"""

from pathlib import Path

from benchmarks import pairs
from benchmarks.language import SHAPE, Plan, assert_same, write_text
from benchmarks.pairs import Comparison
from benchmarks.runs import Side, take_turns, train_py

LENGTH, BATCH, INTERVAL, ROUNDS = 2048, 2, 2, 7
PROCESSES = 2


def measure(_: Path, folder: Path) -> list[Comparison]:
    write_text(folder, (1 + ROUNDS) * INTERVAL * BATCH, LENGTH)
    settings = Plan(SHAPE, LENGTH, BATCH, interval=INTERVAL).settings(folder / "data")
    yamls = {"fsdp_cp": BATCH, "fsdp": BATCH // PROCESSES}
    sides = [
        Side(train_py(settings | {"micro_batch_size": size}, yaml, PROCESSES), folder / yaml)
        for yaml, size in yamls.items()
    ]
    shared, whole = take_turns(ROUNDS, sides)
    assert_same(sides[0], sides[1], within=1e-5)
    return [Comparison("sequences shared by two processes, FSDP x2", "s", shared, whole, 1.2, is_gain=False)]


if __name__ == "__main__":
    pairs.main(measure, __doc__)
