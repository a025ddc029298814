"""`make chat` beside a plain loop with peft, transformers' Trainer and TRL's SFTTrainer: speed and memory.

    python -m benchmarks.chat [--trl=PYTHON] [--only plain trainer trl trl_kept]

SmolLM2-135M with LoRA as configs/chat_lora.yaml asks for, in fp32 on two threads. Ours is train.py under `accelerate
launch`; it computes logits of target tokens alone, the peers those of all. They take turns of a few steps.

- plain: the shortest loop with peft, on the very same packed batches. Asserted: losses within 2%; the batches and the
  learning rate are the same, the adapters' first values are not.
- Trainer and SFTTrainer, as their docs have them (chat_peers.py): 8 chats per step, padded to the longest. Ours packs
  about as many into its 2 sequences of 192 tokens. Real tokens per second, of one epoch of the same chats. Asserted: as
  many tokens, targets and trained weights, and mean losses within 2%, at a learning rate too small to change them.

TRL is not among this project's requirements: PYTHON, or else the environment variable TRL_PYTHON, is that of an
environment that has it. `python -m venv --system-site-packages` makes one, with torch, transformers, peft and trl.
"""

import json
import os
import random
import resource
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from peft import LoraConfig, get_peft_model
from torch.optim import AdamW
from transformers import AutoModelForCausalLM, AutoTokenizer

from benchmarks import pairs
from benchmarks.pairs import Comparison, drift
from benchmarks.runs import CORES, NEVER, PROJECT, Side, arguments, own, take_turns, train_py
from examples.weights import WEIGHTS, find
from src.config.config import load_config
from src.tasks import TASKS
from src.tasks.text.chats import CHATML
from src.tasks.text.packing import best_fit
from src.training.batches import epoch_seed

ROUNDS, STEPS = 5, 4
CHATS = PROJECT / "examples/chats.jsonl"
SETTINGS: dict[str, Any] = {
    "config": PROJECT / "configs/chat_lora.yaml",
    "task.dataset": CHATS,
    "max_steps": STEPS * (1 + ROUNDS),
    "eval_every": NEVER,
    "log_every": STEPS,
    "optim.schedule": "constant",
    "optim.warmup_steps": 0,
}
LENGTH, SEQUENCES = 192, 2  # tokens of a sequence, sequences per step: chat_lora.yaml's
PEER_STEPS, PEER_CHATS, LR = 5, 8, 1e-6
PEERS = {
    "trainer": "chat packed, Trainer",
    "trl": "chat packed, SFTTrainer",
    "trl_kept": "chat packed, SFTTrainer that recomputes nothing",
}


def plain(words: list[str]) -> None:
    """Train as a plain loop does, and print the mean loss of each turn; at the end, the peak memory in bytes."""
    config: Any = load_config(words, TASKS)
    task, optim = config.task, config.optim
    train, _ = task.build_datasets()
    order = task.order(train, np.random.default_rng(epoch_seed(config, 0)), config.global_batch_size)
    auto: Any = AutoModelForCausalLM
    base = auto.from_pretrained(task.model, dtype=torch.float32, trust_remote_code=False)
    model = get_peft_model(base, LoraConfig(**lora(task.lora))).train()
    weights = [weight for weight in model.parameters() if weight.requires_grad]
    optimizer = AdamW(weights, lr=optim.lr, weight_decay=optim.weight_decay)
    losses: list[float] = []
    size, micro = config.global_batch_size, config.forward_batch_size(1)
    for step in range(config.max_steps):
        batch = order[step * size :][:size].tolist()
        micro_batches = [task.collate(train.__getitems__(batch[i : i + micro])) for i in range(0, size, micro)]
        count, total = sum(task.count(micro_batch)["targets"] for micro_batch in micro_batches), 0.0
        for micro_batch in micro_batches:
            inputs = micro_batch["inputs"]
            labels = torch.full_like(inputs["input_ids"], -100)
            labels.view(-1)[inputs["index"]] = inputs["targets"]
            # with a cache, transformers would let packed documents see each other
            rows = {"input_ids": inputs["input_ids"], "position_ids": inputs["position_ids"], "use_cache": False}
            loss = model(**rows, labels=labels, shift_labels=labels, num_items_in_batch=count).loss
            loss.backward()
            total += loss.item()
        torch.nn.utils.clip_grad_norm_(weights, optim.max_grad_norm)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total)
        if len(losses) == STEPS:
            print("loss", sum(losses) / STEPS, flush=True)
            losses.clear()
    print("peak", resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)


def lora(adapters: Any) -> dict[str, Any]:
    """Return the fields of peft's config for the adapters that train.py would make."""
    sizes = {"r": adapters.r, "lora_alpha": adapters.alpha, "exclude_modules": adapters.exclude_modules}
    return {"target_modules": adapters.target_modules or "all-linear", "task_type": "CAUSAL_LM", **sizes}


def compare_plain(model: str, folder: Path) -> list[Comparison]:
    settings = SETTINGS | {"task.model": model}
    ours = Side(train_py(settings), folder / "ours", CORES)
    by_hand = own("chat", "plain", *arguments(settings))
    theirs = Side(by_hand, folder / "plain", CORES, ends=r"^loss (\S+)$", file="log")
    seconds = take_turns(ROUNDS, [ours, theirs])
    off = drift(ours.values, theirs.values)
    assert off < 0.02, f"not the same losses: {ours.values}, {theirs.values}"
    peak = max(ours.output.summary["peak_memory_bytes"]) / 1e9
    their_peak = float(theirs.log.rsplit("peak ", 1)[1]) / 1e9
    return [
        Comparison("chat, plain peft", "s", *seconds, 1.0, is_gain=True),
        Comparison("chat memory, plain peft", "GB", [peak], [their_peak], 1.0, is_gain=False),
    ]


def write_chats(model: str, folder: Path) -> tuple[int, int]:
    """Write as many of the example's chats as fill the sequences of all turns, in random order. Return the number of
    chats and of their tokens."""
    auto: Any = AutoTokenizer
    tokenizer = auto.from_pretrained(model, trust_remote_code=False)
    tokenizer.chat_template = CHATML
    lines = CHATS.read_text().splitlines()
    random.Random(0).shuffle(lines)
    chats: list[Any] = [json.loads(line)["messages"] for line in lines]
    lengths = np.array([len(tokenizer.apply_chat_template(chat, return_dict=True)["input_ids"]) for chat in chats])
    needed = PEER_STEPS * SEQUENCES * (1 + ROUNDS)
    # the last token of a chat predicts nothing, and is left out
    count = next(n for n in range(len(lengths), 0, -1) if len(best_fit(lengths[:n] - 1, LENGTH)) == needed)
    folder.mkdir()
    (folder / "train.jsonl").write_text("".join(f"{line}\n" for line in lines[:count]))
    (folder / "validation.jsonl").write_text(f"{lines[-1]}\n")
    return count, int(lengths[:count].sum())


def compare_packed(model: str, names: list[str], python: str, folder: Path) -> list[Comparison]:
    """Compare with the trainers of other libraries of these names, on the same chats."""
    count, tokens = write_chats(model, folder / "data")
    settings = SETTINGS | {"task.model": model, "task.dataset": folder / "data", "epochs": 1, "max_steps": "null"}
    settings |= {"log_every": PEER_STEPS, "optim.lr": LR}
    sides = {"ours": Side(train_py(settings), folder / "ours", CORES)}
    config: Any = load_config([f"--config={SETTINGS['config']}"], TASKS)
    adapters = lora(config.task.lora)
    plan = json.dumps({"model": model, "lora": adapters, "batch": PEER_CHATS, "lr": LR, "every": PEER_STEPS})
    for name in names:
        interpreter = sys.executable if name == "trainer" else python
        if name != "trainer" and not has_trl(python):
            print(f"no row for {name}: {python} has no trl (--trl=PYTHON)")
            continue
        command = [interpreter, *own("chat_peers", name, plan)[1:]]
        sides[name] = Side(command, folder / name, CORES, ends=r"^tokens \d+ loss (\S+)$", file="log")
    turns = take_turns(ROUNDS, [*sides.values()])
    speeds = {
        name: [n / s for n, s in zip(real_tokens(side)[1 : 1 + ROUNDS], seconds, strict=True)]
        for (name, side), seconds in zip(sides.items(), turns, strict=True)
    }
    ours, *peers = sides.values()
    ours_tokens = sum(real_tokens(ours))
    assert tokens == round(ours_tokens) + count, f"{ours_tokens} real tokens here, {tokens} in {count} chats"
    # the same chats with the last token of each, as the others count them
    speeds["ours"] = [speed * tokens / ours_tokens for speed in speeds["ours"]]
    loss = statistics.mean(ours.values)
    rows = []
    for peer in peers:
        name, work = peer.folder.name, json.loads(peer.log.rsplit("\nwork ", 1)[1].splitlines()[0])
        assert work["tokens"] == tokens, work
        assert work["parameters"] == ours.output.summary["trained_parameters"], (work, ours.output.summary)
        off = drift([work["loss"] / work["targets"]], [loss])
        assert off < 0.02, f"not the same losses: {off}"
        print(f"{name}: {work}, padding {1 - tokens / work['padded_tokens']:.1%}")
        rows.append(Comparison(PEERS[name], "tokens/s", speeds["ours"], speeds[name], 1.5, is_gain=True))
    return rows


def real_tokens(side: Side) -> list[float]:
    """Return those of each turn."""
    if side.folder.name == "ours":
        return [PEER_STEPS * SEQUENCES * LENGTH * (1 - record["perf/padding"]) for record in side.output.records]
    return [float(line.split()[1]) for line in side.log.splitlines() if line.startswith("tokens ")]


def has_trl(python: str) -> bool:
    return subprocess.run([python, "-c", "import trl"], capture_output=True).returncode == 0


def measure(_: Path, folder: Path, trl: str, only: list[str]) -> list[Comparison]:
    name = find(WEIGHTS["chat"])
    model = str(PROJECT / name) if (PROJECT / name).exists() else name
    rows = compare_plain(model, folder / "plain") if "plain" in only else []
    if names := [name for name in PEERS if name in only]:
        (folder / "packed").mkdir()
        rows += compare_packed(model, names, trl, folder / "packed")
    return rows


if __name__ == "__main__":
    pairs.main(
        measure,
        __doc__,
        {"plain": plain},
        trl={"default": os.environ.get("TRL_PYTHON", sys.executable), "help": "a Python with trl"},
        only={"nargs": "+", "choices": ["plain", *PEERS], "default": ["plain", *PEERS], "help": "what to compare with"},
    )
