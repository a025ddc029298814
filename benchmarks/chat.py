"""`make chat` beside transformers' Trainer and TRL's SFTTrainer: speed and memory.

    python -m benchmarks.chat [--trl=PYTHON]

SmolLM2-135M with LoRA as configs/chat_lora.yaml asks for, in fp32 on two threads. Ours is train.py under `accelerate
launch`; it computes logits of target tokens alone, the peers those of all. They take turns of a few steps.

Trainer and SFTTrainer are as their docs have them (chat_peers.py): 8 chats per step, padded to the longest. Ours packs
about as many into its 2 sequences of 192 tokens. Real tokens per second, of one epoch of the same chats. Asserted: as
many tokens, targets and trained weights, and mean losses within 2%, at a learning rate too small to change them.

TRL is not among this project's requirements: PYTHON, or else the environment variable TRL_PYTHON, is that of an
environment that has it. `python -m venv --system-site-packages` makes one, with torch, transformers, peft and trl.
"""

import json
import os
import random
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
from transformers import AutoTokenizer

from benchmarks import pairs
from benchmarks.pairs import Comparison, drift
from benchmarks.runs import CORES, NEVER, PROJECT, Side, own, take_turns, train_py
from examples.chat_weights import CHAT
from examples.weights import find
from src.config.config import load_config
from src.tasks import TASKS
from src.tasks.text.chats import CHATML
from src.tasks.text.packing import best_fit

ROUNDS, STEPS, LR = 5, 5, 1e-6
LENGTH, SEQUENCES, CHATS = 192, 2, 8  # tokens of a sequence, sequences per step: chat_lora.yaml's; chats of a peer
CONFIG = PROJECT / "configs/chat_lora.yaml"
SETTINGS: dict[str, Any] = {"config": CONFIG, "epochs": 1, "max_steps": "null", "eval_every": NEVER}
SETTINGS |= {"log_every": STEPS, "optim.lr": LR, "optim.schedule": "constant", "optim.warmup_steps": 0}
PEERS = {"trainer": "Trainer", "trl": "SFTTrainer that recomputes nothing"}


def write_chats(model: str, folder: Path) -> tuple[int, int]:
    """Write as many of the example's chats as fill the sequences of all turns, in random order. Return the number of
    chats and of their tokens."""
    auto: Any = AutoTokenizer
    tokenizer = auto.from_pretrained(model, trust_remote_code=False)
    tokenizer.chat_template = CHATML
    lines = (PROJECT / "examples/chats.jsonl").read_text().splitlines()
    random.Random(0).shuffle(lines)
    chats: list[Any] = [json.loads(line)["messages"] for line in lines]
    lengths = np.array([len(tokenizer.apply_chat_template(chat, return_dict=True)["input_ids"]) for chat in chats])
    needed = STEPS * SEQUENCES * (1 + ROUNDS)
    # the last token of a chat predicts nothing, and is left out
    count = next(n for n in range(len(lengths), 0, -1) if len(best_fit(lengths[:n] - 1, LENGTH)) == needed)
    folder.mkdir()
    (folder / "train.jsonl").write_text("".join(f"{line}\n" for line in lines[:count]))
    (folder / "validation.jsonl").write_text(f"{lines[-1]}\n")
    return count, int(lengths[:count].sum())


def peer(name: str, model: str, python: str, folder: Path) -> Side:
    config: Any = load_config([f"--config={CONFIG}"], TASKS)
    adapters = config.task.lora
    lora = {"r": adapters.r, "lora_alpha": adapters.alpha, "exclude_modules": adapters.exclude_modules}
    lora |= {"target_modules": adapters.target_modules or "all-linear", "task_type": "CAUSAL_LM"}
    plan = json.dumps({"model": model, "lora": lora, "batch": CHATS, "lr": LR, "every": STEPS})
    command = [sys.executable if name == "trainer" else python, *own("chat_peers", name, plan)[1:]]
    return Side(command, folder / name, CORES, ends=r"^tokens \d+ loss (\S+)$", file="log")


def per_second(tokens: list[float], side: Side) -> list[float]:
    """Return the tokens per second of the turns that count."""
    return [n / s for n, s in zip(tokens[1 : 1 + ROUNDS], side.seconds[1:], strict=True)]


def measure(_: Path, folder: Path, trl: str) -> list[Comparison]:
    name = find(CHAT)
    model = str(PROJECT / name) if (PROJECT / name).exists() else name
    names = [*PEERS]
    if subprocess.run([trl, "-c", "import trl"], capture_output=True).returncode:
        print(f"no row for trl: {trl} does not have it (--trl=PYTHON)", file=sys.stderr)
        names.remove("trl")
    count, tokens = write_chats(model, folder / "data")
    settings = SETTINGS | {"task.model": model, "task.dataset": folder / "data"}
    ours, peers = Side(train_py(settings), folder / "ours", CORES), [peer(name, model, trl, folder) for name in names]
    take_turns(ROUNDS, [ours, *peers])
    real = [STEPS * SEQUENCES * LENGTH * (1 - record["perf/padding"]) for record in ours.output.records]
    assert tokens == round(sum(real)) + count, f"{sum(real)} real tokens here, {tokens} in {count} chats"
    # the same chats with the last token of each, as the others count them
    speeds = per_second([n * tokens / sum(real) for n in real], ours)
    peak, parameters = (ours.output.summary[name] for name in ("peak_memory_bytes", "trained_parameters"))
    rows = []
    for side in peers:
        question, work = PEERS[side.folder.name], json.loads(side.log.rsplit("\nwork ", 1)[1].splitlines()[0])
        assert (work["tokens"], work["parameters"]) == (tokens, parameters), work
        off = drift([work["loss"] / work["targets"]], [statistics.mean(ours.values)])
        assert off < 0.02, f"not the same losses: {off}"
        theirs = [float(line.split()[1]) for line in side.log.splitlines() if line.startswith("tokens ")]
        found = speeds, per_second(theirs, side)
        rows.append(Comparison(f"chat packed, {question}", "tokens/s", found[0], found[1], 1.5, is_gain=True))
        peaks = [max(peak) / 1e9], [work["peak"] / 1e9]
        rows.append(Comparison(f"chat memory, {question}", "GB", peaks[0], peaks[1], 1.0, is_gain=False))
    return rows


if __name__ == "__main__":
    trl = {"default": os.environ.get("TRL_PYTHON", sys.executable), "help": "a Python with trl"}
    pairs.main(measure, __doc__, trl=trl)
