"""Is the transformer trained at least as fast as by Trainer, Lightning, Fabric and a plain Accelerate loop? On the CPU.

    pip install -r benchmarks/requirements.txt
    python -m benchmarks.transformer

A Llama of 10.8 million parameters, 8 sequences of 256 tokens per step, one process with 2 threads. Ours is train.py
under `accelerate launch`, in bf16 also with --compile=true; the peers stay eager. Ours is compared with whichever of
them has the best median. They take turns of 4 steps.

Equal work, each asserted: parameters, steps, tokens, fp32 weights and the precision of products, and the mean loss of
every interval within 1%, which it is only with the same first weights, the same sequences in the same order, and the
same optimizer: fused AdamW at a constant learning rate, no clipping, no dropout, no decay of vectors. Different: ours
learns from 256 targets per sequence, the others from 255; ours and Trainer compute the gradients' norm at each step.
"""

import statistics
from collections.abc import Iterable
from pathlib import Path

from benchmarks import pairs
from benchmarks.language import Plan, assert_same_work, work, write_text
from benchmarks.pairs import Comparison, drift
from benchmarks.runs import CORES, Side, take_turns, train_py

LENGTH, BATCH, INTERVAL, ROUNDS = 256, 8, 4, 3
SHAPE = {
    "hidden_size": 384, "intermediate_size": 1024, "num_hidden_layers": 6, "num_attention_heads": 6,
    "num_key_value_heads": 6,
}  # fmt: skip
PEERS = {
    "Trainer": "language_peers.sequential",
    "Lightning": "lightning_peers.trainer",
    "Fabric": "lightning_peers.fabric",
    "plain": "language_peers.plain",
}


def compare(precision: str, ours: dict[str, float], folder: Path) -> Iterable[Comparison]:
    """Compare each of ours, by name with what it is to reach, with the best of the peers."""
    plan = Plan(SHAPE, LENGTH, BATCH, INTERVAL, precision=precision, micro=BATCH)
    write_text(folder, (1 + ROUNDS) * INTERVAL * BATCH, LENGTH)
    settings = plan.settings(folder / "data")
    commands = {own: train_py(settings | {"compile": own == "compiled"}, precision=precision) for own in ours}
    commands |= {name: plan.peer(peer, folder) for name, peer in PEERS.items()}
    sides = {name: Side(command, folder / name, CORES) for name, command in commands.items()}
    turns = take_turns(ROUNDS, list(sides.values()))
    first = sides["ours"]
    assert_same_work({name: work(side) for name, side in sides.items()})
    assert all(record["perf/padding"] == 0 for record in first.records)
    for name, side in sides.items():
        assert drift(side.values, first.values) < 0.01, f"not the same losses: {first.values}, {name} {side.values}"
    speeds = {name: [INTERVAL * BATCH * LENGTH / s for s in taken] for name, taken in zip(sides, turns, strict=True)}
    medians = {name: statistics.median(of_side) for name, of_side in speeds.items()}
    print(f"{precision}, {work(first)['parameters']:,} parameters, losses {first.values}")
    for name, median in medians.items():
        ratios = ", ".join(f"{own} {medians[own] / median:.3f} times as fast" for own in ours if own != name)
        print(f"  {name:<14} {median:8,.0f} tokens/s ({min(speeds[name]):,.0f} to {max(speeds[name]):,.0f})  {ratios}")
    best = max(PEERS, key=medians.__getitem__)
    for own, target in ours.items():
        question = f"transformer {precision}{' compiled' * (own == 'compiled')}, best peer"
        yield Comparison(question, "tokens/s", speeds[own], speeds[best], target, is_gain=True, is_speed=True)


def measure(_: Path, folder: Path) -> list[Comparison]:
    bf16 = compare("bf16", {"ours": 1.05, "compiled": 1.05}, folder / "bf16")
    return [*bf16, *compare("fp32", {"ours": 1.0}, folder / "fp32")]


if __name__ == "__main__":
    pairs.main(measure, __doc__)
