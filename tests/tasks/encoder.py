"""A tiny encoder, for the tests of tasks that fine-tune one."""

from pathlib import Path

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoConfig, AutoModelForMaskedLM, PreTrainedTokenizerFast


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
