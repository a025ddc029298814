"""Sharding's price: how much longer a step takes under FSDP than under DDP, and how much less memory it holds.

    python -m benchmarks.sharding

A Llama of 97.5 million parameters in fp32, two processes of one thread each on gloo: fsdp.yaml, which gathers a block's
parameters in the forward and again in the backward pass, and fsdp_grad_op.yaml, which gathers them once, both against
ddp.yaml. They take turns of a step; the first two, in which memory is touched for the first time, don't count. Bytes
are those that tests/text/test_sharding.py counts: parameters, gradients and AdamW's state, as held between two steps.

Equal work, which is asserted: the same number of parameters, 8 sequences of 128 tokens a step without padding, in the
same order, fused AdamW at a constant learning rate; the losses of all steps within 1e-4.
"""

import json
from pathlib import Path

from benchmarks import pairs
from benchmarks.language import Plan, told, work, write_text
from benchmarks.pairs import Comparison, drift
from benchmarks.runs import Side, launch, take_turns, train_py

PROCESSES, BATCH, LENGTH = 2, 8, 128
ROUNDS, WARM_UP = 8, 2
YAMLS = ("ddp", "fsdp", "fsdp_grad_op")
LLAMA = {
    "hidden_size": 768, "intermediate_size": 2048, "num_hidden_layers": 12, "num_attention_heads": 12,
    "num_key_value_heads": 12, "vocab_size": 16_384, "tie_word_embeddings": True,
}  # fmt: skip


def assert_equal_work(side: Side, ddp: Side) -> None:
    done = work(side)
    assert abs(done["parameters"] / 97.5e6 - 1) < 0.01
    assert done == work(ddp)
    told(side, rf"strategy +{side.folder.name} .*, 2 processes on gloo.*, cpu, fp32")
    assert all(record["perf/padding"] == 0 for record in side.records)
    off = drift(side.values, ddp.values)
    assert off < 1e-4, f"{side.folder.name}: losses {off:.0e} away from DDP's"


def bytes_held(yaml: str, folder: Path) -> float:
    """Return those of the process that holds most."""
    side = Side([*launch(yaml, PROCESSES), "-m", "tests.text.test_sharding", "100M"], folder / f"bytes-{yaml}")
    side.run()
    counts = [json.loads(line) for line in side.log.splitlines() if line.startswith("{")]
    assert [count["strategy"] for count in counts] == [yaml] * PROCESSES
    return max(count["parameters"] + count["gradients"] + count["optimizer"] for count in counts)


def measure(_: Path, folder: Path) -> list[Comparison]:
    write_text(folder, (WARM_UP + ROUNDS) * BATCH, LENGTH)
    settings = Plan(LLAMA, LENGTH, BATCH).settings(folder / "data")
    sides = [Side(train_py(settings, yaml, PROCESSES), folder / yaml) for yaml in YAMLS]
    ddp, fsdp, grad_op = take_turns(ROUNDS, sides, WARM_UP)
    for side in sides:
        assert_equal_work(side, sides[0])
    ddp_bytes, fsdp_bytes, grad_op_bytes = ([bytes_held(yaml, folder) / 1e6] for yaml in YAMLS)
    what = "against ddp, 97.5M Llama, fp32, x2"
    rows = []
    for name, seconds, held in (("fsdp", fsdp, fsdp_bytes), ("grad-op", grad_op, grad_op_bytes)):
        rows.append(Comparison(f"sharding: step, {name} {what}", "s", seconds, ddp, 1.35, is_gain=False))
        rows.append(Comparison(f"sharding: bytes, {name} {what}", "MB", held, ddp_bytes, 0.505, is_gain=False))
    return rows


if __name__ == "__main__":
    pairs.main(measure, __doc__)
