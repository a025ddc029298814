"""Language models: what train.py and its peers are both told, the data, and what each says that it did."""

import json
import math
import random
import re
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.runs import Side
from src.tasks.text.byte_tokenizer import byte_tokenizer

SEED, WEIGHT_DECAY = 0, 0.01
STRATEGY = r"strategy .*, (\w+), (\w+) \(.*\)$"


@dataclass(frozen=True)
class Plan:
    """The same for train.py and for what it is compared with."""

    shape: dict[str, Any]
    """Fields of LlamaConfig; without vocab_size, it is the byte tokenizer's."""
    length: int  # tokens of a sequence
    batch: int
    """Sequences per step; a peer makes it of `passes` with `micro` sequences, or padded documents, each."""
    interval: int = 1  # steps between two records of the loss
    epochs: int = 1
    lr: float = 1e-3
    precision: str = "bf16"
    micro: int = 0
    passes: int = 1
    is_cuda: bool = False

    def settings(self, data: Path) -> dict[str, Any]:
        """Return train.py's."""
        return {
            "seed": SEED,
            "epochs": self.epochs,
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
        }

    def peer(self, name: str, folder: Path) -> list[str]:
        """Return the command of a peer, MODULE.ARGUMENT, to be started inside `folder`, where the data are."""
        (folder / "plan.json").write_text(json.dumps(asdict(self)))
        module, argument = name.split(".")
        return [sys.executable, "-m", f"benchmarks.{module}", argument]


def generated(size: int, source: random.Random) -> str:
    """Return `size` bytes of words that a model can learn: a few are frequent, most are rare."""
    words = ["".join(source.choices("etaoinshrdlu", k=source.randint(1, 8))) for _ in range(1000)]
    return " ".join(source.choices(words, weights=[1 / rank for rank in range(1, 1001)], k=size))[:size]


def write_text(folder: Path, sequences: int, length: int) -> None:
    """Write a text that makes exactly so many sequences, and them as the peers read them: in train.py's order."""
    text = generated(sequences * length - 1, random.Random(SEED))  # a token in front begins it
    (folder / "data").mkdir(parents=True)
    (folder / "data" / "train.txt").write_text(text)
    (folder / "data" / "validation.txt").write_text(text[: length - 1])
    rows = np.array(byte_tokenizer()(text, verbose=False)["input_ids"]).reshape(-1, length)
    np.save(folder / "sequences.npy", rows[np.random.default_rng([SEED, 0]).permutation(sequences)])


def write_instructions(folder: Path, documents: int, median: float, length: int) -> None:
    """Write rows of prompt and completion of log-normal length, sigma 1, up to `length`; a few also to evaluate on."""
    source = random.Random(SEED)
    rows = []
    for _ in range(documents):
        size = min(max(round(source.lognormvariate(math.log(median), 1.0)), 8), length - 2)
        text, cut = generated(size, source), source.randint(2, size - 2)
        rows.append(json.dumps({"prompt": text[:cut], "completion": text[cut:]}) + "\n")
    (folder / "data").mkdir(parents=True)
    (folder / "data" / "train.jsonl").write_text("".join(rows))
    (folder / "data" / "validation.jsonl").write_text("".join(rows[:8]))


def tokenised(folder: Path) -> list[dict[str, list[int]]]:
    """Return these documents as Trainer reads them: the labels are not shifted."""
    tokenizer = byte_tokenizer()
    documents = []
    for row in map(json.loads, (folder / "data" / "train.jsonl").read_text().splitlines()):
        prompt = tokenizer(row["prompt"])["input_ids"]
        completion = [*tokenizer(row["completion"], add_special_tokens=False)["input_ids"], tokenizer.eos_token_id]
        documents.append({"input_ids": prompt + completion, "labels": [-100] * len(prompt) + completion})
    return documents


def work(side: Side) -> dict[str, Any]:
    """Return what a side did. Of documents, tokens are those that are followed by another of theirs."""
    if (side.folder / "work.json").exists():
        return json.loads((side.folder / "work.json").read_text())
    last = side.records[-1]
    (parameters,), (device, precision) = told(side, r"model +([\d,]+) param"), told(side, STRATEGY)
    return {
        "parameters": int(parameters.replace(",", "")),
        "steps": last["step"],
        "tokens": round(last["epoch"] * train_data(side)["tokens"]),
        "device": device,
        "precision": precision,
    }


def train_data(side: Side) -> dict[str, int]:
    """Return what a run of train.py says of an epoch: sequences, tokens, targets and truncated documents."""
    counts = re.findall(r"(?:^|, )([a-z ]+) ([\d,]*\d)(?=,|$)", told(side, r"train +(sequences .*)")[0])
    return {name: int(count.replace(",", "")) for name, count in counts}


def told(side: Side, pattern: str) -> tuple[str, ...]:
    """Return the groups of a pattern of train.py's start-up summary."""
    found = re.search(f"^  {pattern}", side.log, re.MULTILINE)
    assert found, f"{pattern} is not in {side.log[:3000]}"
    return found.groups()


def assert_same_work(works: dict[str, dict[str, Any]]) -> None:
    """Compare them with the first one's."""
    expected = next(iter(works.values()))
    for name, done in works.items():
        assert done == expected, f"not the same work: {expected}, {name} {done}"
