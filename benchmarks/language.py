"""A small Llama trained by train.py, by the Trainer of transformers and by a plain loop on Accelerate, on the CPU.

    python -m benchmarks.language

A Llama of 10.8 million parameters, 8 sequences of 256 tokens per step, one process with 2 threads. Ours is train.py
under `accelerate launch`, in bf16, where the CPU has it, also with --compile=true; the peers (language_peers.py) stay
eager. Ours is compared with whichever of them has the better median. They take turns of 4 steps.

Equal work, each asserted: parameters, steps, tokens, fp32 weights and the precision of products, and the mean loss of
every interval within 1%, which it is only with the same first weights, the same sequences in the same order, and the
same optimizer: fused AdamW at a constant learning rate, no clipping, no dropout, no decay of vectors. Different: ours
learns from 256 targets per sequence, the others from 255; ours and Trainer compute the gradients' norm at each step.

Saves: for how long one keeps the loop from training, of a Llama of 100M parameters with AdamW's state (1.3 GB), against
`accelerator.save_state` of the same. In turn; ours is written in the background, while it trains 20 steps.
"""

import json
import random
import statistics
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import pairs
from benchmarks.pairs import Comparison, drift
from benchmarks.runs import CORES, Side, has_bf16, own, rate, take_turns, train_py
from src.tasks.text.tokenizing import byte_tokenizer

SEED, WEIGHT_DECAY = 0, 0.01
LENGTH, BATCH, INTERVAL, ROUNDS = 256, 8, 4, 3
SHAPE = {"hidden_size": 384, "intermediate_size": 1024, "num_hidden_layers": 6, "num_attention_heads": 6}
PEERS = ("trainer", "plain")
SAVES, STEPS = 5, 20
LARGE = {"hidden_size": 768, "intermediate_size": 2048, "num_hidden_layers": 12, "num_attention_heads": 12}
LARGE |= {"vocab_size": 16_000}


@dataclass(frozen=True)
class Plan:
    """Settings shared by train.py and its peers."""

    shape: dict[str, Any]
    """Fields of LlamaConfig; without vocab_size, it is the byte tokenizer's."""
    length: int  # tokens of a sequence
    batch: int  # sequences per step
    micro: int = 1  # sequences at once, of a peer
    interval: int = 1  # steps between two logged losses
    lr: float = 1e-3
    precision: str = "bf16"
    is_cuda: bool = False

    def settings(self, data: Path) -> dict[str, Any]:
        """Return train.py's."""
        return {
            "seed": SEED,
            "epochs": 1,
            "global_batch_size": self.batch,
            "log_every": self.interval,
            "task.name": "causal_lm",
            "task.dataset": data,
            "task.sequence_length": self.length,
            "task.architecture": json.dumps({"model_type": "llama", **self.shape}),
            "optim.lr": self.lr,
            "optim.weight_decay": WEIGHT_DECAY,
            "optim.schedule": "constant",
            "optim.warmup_steps": 0,
            "optim.max_grad_norm": "null",
            "optim.betas": "[0.9, 0.999]",  # torch's, as the peers have them
        }

    def peer(self, name: str, folder: Path) -> list[str]:
        """Return the command of a peer, to be started inside `folder`, where the data are."""
        (folder / "plan.json").write_text(json.dumps(asdict(self)))
        return own("language_peers", name)


def write_text(folder: Path, sequences: int, length: int) -> None:
    """Write a text that makes exactly so many sequences, and them as the peers read them: in train.py's order.

    A model can learn its words: a few are frequent, most are rare."""
    source = random.Random(SEED)
    words = ["".join(source.choices("etaoinshrdlu", k=source.randint(1, 8))) for _ in range(1000)]
    size = sequences * length - 1  # a token in front begins it
    text = " ".join(source.choices(words, weights=[1 / rank for rank in range(1, 1001)], k=size))[:size]
    (folder / "data").mkdir(parents=True)
    (folder / "data" / "train.txt").write_text(text)
    (folder / "data" / "validation.txt").write_text(text[: length - 1])
    rows = np.array(byte_tokenizer()(text, verbose=False)["input_ids"]).reshape(-1, length)
    np.save(folder / "sequences.npy", rows[np.random.default_rng([SEED, 0]).permutation(sequences)])


def work(side: Side) -> dict[str, Any]:
    """Return what a side has done."""
    if (side.folder / "work.json").exists():
        return json.loads((side.folder / "work.json").read_text())
    assert all(record["perf/padding"] == 0 for record in side.output.records)
    summary = side.output.summary
    own = {name: summary[name] for name in ("parameters", "step", "device", "precision")}
    return own | {"tokens": round(summary["epoch"] * summary["data"]["train"]["tokens"])}


def assert_same(side: Side, first: Side, within: float) -> None:
    """Compare the work of two sides, and their losses."""
    assert work(side) == work(first), f"not the same work: {work(first)}, {side.folder.name} {work(side)}"
    off = drift(side.values, first.values)
    assert off < within, f"not the same losses: {first.values}, {side.folder.name} {side.values}"


def compare(precision: str, ours: dict[str, float], folder: Path) -> Iterator[Comparison]:
    """Compare each of ours, by name with what it is to reach, with the best of the peers."""
    plan = Plan(SHAPE, LENGTH, BATCH, BATCH, INTERVAL, precision=precision)
    write_text(folder, (1 + ROUNDS) * INTERVAL * BATCH, LENGTH)
    settings = plan.settings(folder / "data")
    commands = {name: train_py(settings | {"compile": name == "compiled"}, precision=precision) for name in ours}
    commands |= {name: plan.peer(name, folder) for name in PEERS}
    sides = [Side(command, folder / name, CORES) for name, command in commands.items()]
    turns = take_turns(ROUNDS, sides)
    for side in sides:
        assert_same(side, sides[0], within=0.01)
    speeds = {name: rate(INTERVAL * BATCH * LENGTH, taken) for name, taken in zip(commands, turns, strict=True)}
    best = max(PEERS, key=lambda name: statistics.median(speeds[name]))
    for name, target in ours.items():
        question = f"transformer {precision}{' compiled' * (name == 'compiled')}, best peer"
        yield Comparison(question, "tokens/s", speeds[name], speeds[best], target, is_gain=True)


def compare_saves(folder: Path) -> Comparison:
    write_text(folder, sequences=(SAVES + 2) * STEPS, length=32)
    plan, pauses = Plan(LARGE, length=32, batch=1), r"\(paused ([\d,]+) ms\)"
    settings = plan.settings(folder / "data") | {"save_every": STEPS, "max_steps": (SAVES + 2) * STEPS}
    commands = {"ours": train_py(settings), "saves": plan.peer("saves", folder)}
    sides = [Side(command, folder / name, ends=pauses, file="log") for name, command in commands.items()]
    take_turns(SAVES, sides)
    times = [side.values[1 : 1 + SAVES] for side in sides]
    return Comparison("pause of a save, Llama of 100M, save_state", "ms", times[0], times[1], 1, is_gain=False)


def measure(_: Path, folder: Path) -> list[Comparison]:
    bf16 = compare("bf16", {"ours": 1.05, "compiled": 1.05}, folder / "bf16") if has_bf16() else ()
    return [*bf16, *compare("fp32", {"ours": 1.0}, folder / "fp32"), compare_saves(folder / "saves")]


if __name__ == "__main__":
    pairs.main(measure, __doc__)
