"""Short runs of language models and classifiers, on tiny models and data and on the chat model's real weights."""

from contextlib import chdir
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from examples import chat_weights
from examples.weights import MODELS, fetch
from src.config.errors import UserError
from tests.curves import Short
from tests.launching import PROJECT
from tests.text import tiny

CONSTANT = ("--log_every=1", "--optim.schedule=constant", "--optim.warmup_steps=0")
EARLY = (
    *CONSTANT, "--max_steps=12", "--save_every=8", "--optim.lr=1e-3", "--optim.max_grad_norm=1",
    "--global_batch_size=8", "--task.eval_from=last",
)  # fmt: skip
MIXTRAL = ("--task.architecture.model_type=mixtral", "--task.architecture.num_local_experts=2")
FEW_LOGITS = "import src.tasks.text.loss as m; m.CHUNK = 5000\n"
"""Logits of 19 tokens at a time, as if the vocabulary were large."""
SMOLLM2 = PROJECT / MODELS / Path(chat_weights.CHAT.name).name


def text(folder: Path) -> None:
    """Write models and data."""
    models = folder / "models"
    tiny.saved("bert", models / "bert", **tiny.SIZES, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
    tiny.saved("t5", models / "t5", **tiny.T5)
    llamas: dict[str, Any] = {
        "llama": {},
        "spread": {"initializer_range": 0.1},  # with 0.02, logits are near zero, whatever the adapters learn
        "tied": {"tie_word_embeddings": True},
        "untied": {"tie_word_embeddings": False},
    }
    for name, fields in llamas.items():
        tiny.saved("llama", models / name, **fields, **tiny.LLAMA)
    tiny.questions(folder / "questions.jsonl")
    tiny.chats(folder / "chats.jsonl")
    tiny.reviews(folder / "reviews")
    tiny.rated(folder / "rated.jsonl")


def mixture(folder: Path) -> None:
    """Write the shards of two sources."""
    tiny.shards(folder / "shards", 3000)
    tiny.shards(folder / "other", 300, seed=1, words=30)


def chat_model(_: Path) -> None:
    """Fetch SmolLM2-135M-Instruct into the folder where `make chat` keeps it."""
    if not SMOLLM2.exists():
        try:
            with chdir(PROJECT):
                fetch(chat_weights.CHAT, SMOLLM2)
        except UserError as error:
            pytest.skip(str(error))


LM = Short(
    ("--task.name=causal_lm", "--task.dataset={folder}/questions.jsonl", "--task.sequence_length=128",
     "--task.samples=[]", *EARLY),
    text, ("--micro_batch_size=4",), ("--micro_batch_size=2", "--activation_checkpointing=true"), FEW_LOGITS, saved=8,
)  # fmt: skip
"""Packed, with masked prompts and clipping, and of ragged lengths, so that the last batches are ragged too. Under a
strategy there are micro-batches of two sequences, activations are recomputed, losses computed chunk by chunk."""
CLASSIFIER = replace(LM, arguments=("--task.name=text_classification", "--task.dataset={folder}/reviews", *EARLY))
RATED = (*CLASSIFIER.arguments, "--task.dataset={folder}/rated.jsonl", "--task.model={folder}/models/bert")
SEVERAL = ("--task.problem=multi_label_classification", "--task.label_column=labels", "--task.class_weights=balanced")
NUMBERS = ("--task.problem=regression", "--task.label_column=score", "--task.model={folder}/models/spread")
LLAMA, BERT, ADAPTERS = "--task.model={folder}/models/llama", "--task.model={folder}/models/bert", "--task.lora.r=4"
MERGED = (ADAPTERS, "--task.lora.merge=true")
NEW_TOKENS = (
    "--task.name=causal_lm", "--task.dataset={folder}/chats.jsonl", "--task.sequence_length=64", *MERGED, *CONSTANT,
    "--task.chat_template=chatml", "--task.new_tokens=[<|im_start|>,<|im_end|>]", "--max_steps=12", "--task.samples=[]",
    "--global_batch_size=8", "--micro_batch_size=2", "--optim.lr=1e-2", "--optim.weight_decay=0",
)  # fmt: skip
FOUR_BITS = (
    "--task.name=causal_lm", "--task.dataset={folder}/questions.jsonl", "--task.sequence_length=64", *MERGED, *CONSTANT,
    "--task.model={folder}/models/spread", "--task.lora.base_dtype=nf4", "--task.eval_from=last", "--max_steps=50",
    "--save_every=25", "--eval_every=20", "--global_batch_size=2", "--micro_batch_size=1", "--optim.lr=3e-3",
    "--task.samples=[]",
)  # fmt: skip
CHAT = (
    "--task.name=causal_lm", f"--config={PROJECT}/configs/chat_lora.yaml", f"--task.model={SMOLLM2}", *CONSTANT,
    "--max_steps=10", "--save_every=5", "--global_batch_size=2", "--task.sequence_length=96", "--task.lora.merge=true",
    "--task.samples=[]",
)  # fmt: skip
"""Ten steps as `make chat` takes them, on fewer tokens."""


def over(groups: int, cp: int, replicas: int = 1, *launcher_arguments: str) -> dict[str, Any]:
    """Return what `launch` takes for fsdp_cp.yaml on so many groups of processes that share their sequences."""
    sizes = {"dp_replicate": replicas, "dp_shard": groups, "cp": cp}
    words = (f"--parallelism_config_{name}_size={size}" for name, size in sizes.items())
    return {"processes": replicas * groups * cp, "launcher_arguments": (*words, *launcher_arguments)}


def of(task: Short, *arguments: str) -> Short:
    """Return the task with further arguments."""
    return replace(task, arguments=(*task.arguments, *arguments))


TEXT = {
    "lm": of(LM, LLAMA, "--task.samples=null", "--task.eval_datasets.all={folder}/questions.jsonl"),
    "lm with dropout": of(
        LM, LLAMA, "--task.dropout=0.1", "--task.sequence_length=64", "--log_every=3", "--task.samples=null"
    ),
    "scratch": of(LM, *tiny.NEW_LLAMA),
    "experts": replace(of(LM, *tiny.NEW_LLAMA, *MIXTRAL), split=(*LM.split, "--activation_offload=true")),
    "lm with adapters": of(LM, LLAMA, *MERGED),
    "classifier": of(CLASSIFIER, BERT, "--task.eval_datasets.dev={folder}/reviews/dev.tsv"),
    "lm with DoRA": of(LM, LLAMA, *MERGED, "--task.lora.options={use_dora: true}"),
    "lm with PiSSA": of(LM, LLAMA, *MERGED, "--task.lora.options={init_lora_weights: pissa}"),
    "classifier with adapters": of(CLASSIFIER, BERT, ADAPTERS),
    "classifier with a decoder": of(CLASSIFIER, "--task.model={folder}/models/t5"),
    "classifier, weighed": of(CLASSIFIER, BERT, "--task.class_weights={falling: 3, rising: 0.5}"),
    "several labels": replace(LM, arguments=(*RATED, *SEVERAL)),
    "numbers": replace(LM, arguments=(*RATED, *NUMBERS)),
    "new tokens, tied": Short((*NEW_TOKENS, "--task.model={folder}/models/tied"), text),
    "new tokens, untied": Short((*NEW_TOKENS, "--task.model={folder}/models/untied"), text),
    # a loss in bf16 is rounded to 2**-9
    "lm in 4 bits": Short(FOUR_BITS, text, launcher_arguments=("--mixed_precision=bf16",), within=2**-9, saved=25),
    "chat": Short(CHAT, chat_model, saved=5),
    "chat with new tokens": Short((*CHAT, "--max_steps=3", "--task.new_tokens=['<|fact|>', '<|end|>']"), chat_model),
    "mixture, streamed": Short(
        ("--task.name=streamed_lm", "--task.sequence_length=64", "--task.shuffle_window=100", *tiny.NEW_LLAMA,
         # the second source is used up before the epoch ends, after it came twice; a window makes some nine steps
         "--task.sources=[{dataset: {folder}/shards, weight: 2}, {dataset: {folder}/other, weight: 1, max_epochs: 2}]",
         "--max_steps=24", "--log_every=1", "--save_every=3", "--checkpoint.keep_last=9", "--global_batch_size=12",
         "--optim.lr=1e-3"),
        mixture, split=("--num_workers=2",), saved=12,
    ),
}  # fmt: skip
