"""Tiny models, written as a user would have them in a folder, and tiny data with ragged lengths."""

import json
import random
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForMaskedLM

from src.tasks.text.tokenizing import byte_tokenizer

SIZES: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
LLAMA: dict[str, Any] = SIZES | {"num_key_value_heads": 2}
NEW_LLAMA = ("--task.architecture.model_type=llama", *(f"--task.architecture.{n}={v}" for n, v in LLAMA.items()))
"""A Llama from scratch, on the command line."""
WORDS = ["the", "of", "and", "to", "in", "is", "you", "that", "it", "he", "was", "for", "on", "are", "as", "with"]


def llama(folder: Path, seed: int = 0) -> Path:
    """A causal language model with fresh weights, and the byte tokenizer."""
    return saved("llama", folder, seed=seed, **LLAMA)


def bert(folder: Path) -> Path:
    """An encoder without dropout, and the byte tokenizer."""
    return saved("bert", folder, **SIZES, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)


def saved(
    kind: str, folder: Path, dtype: torch.dtype = torch.float32, file_size: str = "5GB", seed: int = 0, **fields: Any
) -> Path:
    """A model of this kind with these fields of its config, fresh weights and the byte tokenizer."""
    tokenizer = byte_tokenizer()
    special = {f"{name}_token_id": getattr(tokenizer, f"{name}_token_id") for name in ("bos", "eos", "pad")}
    sizes = {"vocab_size": len(tokenizer), "max_position_embeddings": 256}
    auto: Any = AutoModelForMaskedLM if kind == "bert" else AutoModelForCausalLM
    torch.manual_seed(seed)
    model = auto.from_config(AutoConfig.for_model(kind, **special | sizes | fields), dtype=dtype)
    model.save_pretrained(folder, max_shard_size=file_size)
    tokenizer.save_pretrained(folder)
    return folder


def questions(file: Path, rows: int = 120) -> Path:
    """Prompts of 1 to 8 words with completions of 1 to 12."""
    draw = random.Random(0)

    def words(most: int) -> str:
        return " ".join(draw.choices(WORDS, k=draw.randint(1, most)))

    lines = [{"prompt": f"Q: {words(8)}\nA:", "completion": f" {words(12)}"} for _ in range(rows)]
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return file


def reviews(folder: Path, train: int = 110, evaluation: int = 37) -> Path:
    """Texts of 1 to 20 words, labelled by whether the first word comes before the last; train.tsv and dev.tsv."""
    draw = random.Random(0)
    folder.mkdir()
    for name, count in (("train", train), ("dev", evaluation)):
        texts = [draw.choices(WORDS, k=draw.randint(1, 20)) for _ in range(count)]
        rows = [f"{' '.join(text)}\t{'rising' if text[0] < text[-1] else 'falling'}\n" for text in texts]
        (folder / f"{name}.tsv").write_text("text\tlabel\n" + "".join(rows))
    return folder


def chats(file: Path) -> None:
    """Of a question and an answer each."""
    rows = [[{"role": "user", "content": f"say {i}"}, {"role": "assistant", "content": f"{i} {i}"}] for i in range(40)]
    file.write_text("".join(json.dumps({"messages": row}) + "\n" for row in rows))
