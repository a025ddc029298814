"""Tiny models and data, for the tests of tasks on text."""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoConfig, AutoModelForMaskedLM, PreTrainedTokenizerFast

LLAMA = """
    --task.architecture.model_type=llama --task.architecture.hidden_size=32 --task.architecture.intermediate_size=64
    --task.architecture.num_hidden_layers=2 --task.architecture.num_attention_heads=4
    --task.architecture.num_key_value_heads=2
"""
"""Settings of a decoder of two layers, with random weights."""


def write_rows(file: Path, rows: Iterable[dict[str, Any]]) -> None:
    """Write rows as JSON lines."""
    file.parent.mkdir(exist_ok=True)
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))


def write_encoder(folder: Path) -> None:
    """Write a tiny encoder with random weights, and a tokenizer of bytes."""
    vocabulary = {token: i for i, token in enumerate(["<pad>", *sorted(pre_tokenizers.ByteLevel.alphabet())])}
    bytes_alone = Tokenizer(models.BPE(vocabulary, []))
    bytes_alone.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=bytes_alone, pad_token="<pad>")
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = AutoConfig.for_model(
        "bert", vocab_size=len(tokenizer), pad_token_id=tokenizer.pad_token_id, max_position_embeddings=128, **sizes
    )
    torch.manual_seed(0)
    AutoModelForMaskedLM.from_config(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
