"""`make chat` beside a plain loop with peft: a step's time, and the memory that it takes, on the same batches.

    python -m benchmarks.chat

Both train what configs/chat_lora.yaml asks for, in fp32 on two threads, and take turns of 4 steps. Each asserts the
other's losses within 2%: the batches and the learning rate are the same, the adapters' first values are not. Ours is
train.py under `accelerate launch`; it computes logits of target tokens alone, the plain loop those of all.
"""

import resource
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from peft import LoraConfig, get_peft_model
from torch.optim import AdamW
from transformers import AutoModelForCausalLM

from benchmarks import pairs
from benchmarks.pairs import Comparison, drift
from benchmarks.runs import CORES, NEVER, PROJECT, Side, take_turns, train_py
from examples.weights import WEIGHTS, find
from src.config.config import load_config
from src.tasks import TASKS
from src.training.batches import epoch_seed

STEPS, ROUNDS = 4, 3
SETTINGS: dict[str, Any] = {
    "config": PROJECT / "configs/chat_lora.yaml",
    "task.dataset": PROJECT / "examples/chats.jsonl",
    "task.questions": "null",
    "max_steps": STEPS * (1 + ROUNDS),
    "eval_every": NEVER,
    "log_every": STEPS,
    "optim.schedule": "constant",
    "optim.warmup_steps": 0,
}


def plain(arguments: list[str]) -> None:
    """Train as a plain loop does, and print the mean loss of each turn; at the end, the peak memory in bytes."""
    config: Any = load_config(arguments, TASKS)
    task, optim = config.task, config.optim
    train, _ = task.build_datasets()
    order = task.order(train, np.random.default_rng(epoch_seed(config, 0)), config.global_batch_size)
    auto: Any = AutoModelForCausalLM
    base = auto.from_pretrained(task.model, dtype=torch.float32)
    targets = task.lora.target_modules or "all-linear"
    lora = LoraConfig(
        r=task.lora.r,
        lora_alpha=task.lora.alpha,
        target_modules=targets,
        exclude_modules=task.lora.exclude_modules,
        task_type="CAUSAL_LM",
    )
    model = get_peft_model(base, lora).train()
    weights = [weight for weight in model.parameters() if weight.requires_grad]
    optimizer = AdamW(weights, lr=optim.lr, weight_decay=optim.weight_decay)
    losses: list[float] = []
    for step in range(config.max_steps):
        batch = order[step * config.global_batch_size :][: config.global_batch_size]
        parts = [
            batch[i : i + config.forward_batch_size(1)] for i in range(0, len(batch), config.forward_batch_size(1))
        ]
        micro_batches = [task.collate(train.__getitems__(part.tolist())) for part in parts]
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


def measure(_: Path, folder: Path) -> list[Comparison]:
    name = find(WEIGHTS["chat"])
    model = PROJECT / name if (PROJECT / name).exists() else name
    settings = SETTINGS | {"task.model": model}
    words = [f"--{setting}={value}" for setting, value in (settings | {"output_dir": "run"}).items()]
    ours = Side(train_py(settings), folder / "ours", CORES)
    peer = [sys.executable, "-m", "benchmarks.chat", "plain", *words]
    theirs = Side(peer, folder / "plain", CORES, ends=r"^loss (\S+)$", file="log")
    seconds = take_turns(ROUNDS, [ours, theirs])
    off = drift(ours.values, theirs.values)
    assert off < 0.02, f"not the same losses: {ours.values}, {theirs.values}"
    print(f"losses {ours.values} {theirs.values}, seconds {seconds}")
    peaks = max(ours.summary["peak_memory_bytes"]) / 1e9, float(theirs.log.rsplit("peak ", 1)[1]) / 1e9
    own_time, peers_time = seconds
    return [
        Comparison("chat, plain peft", "s", own_time, peers_time, 1.0, is_gain=True),
        Comparison("chat memory, plain peft", "GB", [peaks[0]], [peaks[1]], 1.0, is_gain=False),
    ]


if __name__ == "__main__":
    if sys.argv[1:2] == ["plain"]:
        plain(sys.argv[2:])
    else:
        pairs.main(measure, pairs.parser(__doc__))
