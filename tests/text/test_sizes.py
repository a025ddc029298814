"""What docs/transformers.md says of models that are too large to try here, worked out from models without weights."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import init_empty_weights
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from src.tasks.text.lora import Lora

PAGE = Path(__file__).parents[2] / "docs" / "transformers.md"
PROCESSES = 8
CONFIGS = {
    "8B": LlamaConfig(
        vocab_size=128256, hidden_size=4096, intermediate_size=14336, num_hidden_layers=32, num_attention_heads=32,
        num_key_value_heads=8,
    ),
    "70B": LlamaConfig(
        vocab_size=128256, hidden_size=8192, intermediate_size=28672, num_hidden_layers=80, num_attention_heads=64,
        num_key_value_heads=8,
    ),
}  # fmt: skip
"""Llama 3.1."""


def share(parameters: list[nn.Parameter], bytes_each: int) -> int:
    """Of one process in bytes: FSDP gives it rows, the last process perhaps fewer."""
    return sum(-(-p.shape[0] // PROCESSES) * (p.numel() // p.shape[0]) for p in parameters) * bytes_each


def figures(size: str, adapters: bool) -> list[str]:
    """The cells of a row: bytes of one process, in GB."""
    with init_empty_weights(include_buffers=False):
        model: Any = LlamaForCausalLM(CONFIGS[size])
    units = [*model.model.layers, model.model.embed_tokens, model.lm_head]
    gathered = max(sum(parameter.numel() for parameter in unit.parameters()) for unit in units) * 2
    if adapters:
        model = Lora(r=16, base_dtype="bf16").add_adapters(model, "CAUSAL_LM", None)
    parameters = list(model.parameters())
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    assert {parameter.dtype for parameter in trained} == {torch.float32}
    shares = [share([parameter], parameter.element_size()) for parameter in parameters]
    weights, gradients, adamw = sum(shares), share(trained, 4), share(trained, 8)
    cells = weights + max(shares), weights, gradients, adamw, weights + gradients + adamw, gathered, share(trained, 12)
    return [f"{cell / 1e9:.2f}" for cell in cells]


@pytest.mark.parametrize("adapters", [False, True])
@pytest.mark.parametrize("size", CONFIGS)
def test_the_table_of_sizes(size: str, adapters: bool) -> None:
    name = f"Llama 3.1 {size}, adapters" if adapters else f"Llama 3.1 {size}"
    (row,) = re.findall(rf"^\| {name} \|(.*)\|$", PAGE.read_text(), re.MULTILINE)
    assert [cell.strip() for cell in row.split("|")] == figures(size, adapters)
