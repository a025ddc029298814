"""The operations that perf/mfu counts: those that torch's counter sees, and pairs of tokens as the masks have them."""

from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoConfig, AutoModelForCausalLM

from src.tasks.text.causal_lm import CausalLM
from src.tasks.text.language_model import LanguageModel
from src.tasks.text.lora import Lora

SMALL = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0,
}  # fmt: skip
DECODERS: dict[str, dict[str, Any]] = {
    "llama": SMALL,
    "gpt2": {"n_embd": 32, "n_layer": 2, "n_head": 4, "vocab_size": 64, "bos_token_id": 0, "eos_token_id": 0},
}  # fmt: skip


def build(kind: str, **fields: Any) -> Any:
    config = AutoConfig.for_model(kind, **DECODERS.get(kind, {}) | fields)
    return AutoModelForCausalLM.from_config(config, attn_implementation="eager")


def counted(model: LanguageModel, length: int) -> tuple[int, float]:
    """Return torch's count of a step, and ours. Every third token has no target. Torch counts all pairs of tokens, as a
    mask only hides what has been computed: ours is of as many."""
    tokens, positions = torch.randint(64, (2, length)), torch.arange(length).expand(2, -1)
    index = torch.tensor([i for i in range(2 * length) if i % 3])
    with FlopCounterMode(display=False) as counter:
        targets = torch.randint(64, index.shape)
        model("loss", index, targets, input_ids=tokens, position_ids=positions).backward()
    assert model.flops
    return counter.get_total_flops(), model.flops.total(2 * length, len(index), 2 * length**2)


@pytest.mark.parametrize("kind", DECODERS)
def test_the_operations_of_a_step_are_those_that_torch_counts(kind: str) -> None:
    """Most are in the matrices for the short sequences, and in the attention for the long ones."""
    for length in (8, 128):
        torchs, ours = counted(LanguageModel(build(kind)), length)
        assert ours == pytest.approx(torchs, rel=1e-6)


def test_frozen_weights_take_no_gradients_of_their_own() -> None:
    """Within 2%: the gradient of the first layer's input, which nothing needs then, is counted. Tried with all weights
    taken for trained: 33% too many."""
    lm = Lora(r=4).add_adapters(build("llama", num_hidden_layers=16), "CAUSAL_LM", None)
    torchs, ours = counted(LanguageModel(lm), 16)
    assert ours == pytest.approx(torchs, rel=0.02)


def test_models_of_other_layers_have_no_count() -> None:
    """State spaces, convolutions, windows, experts."""
    for kind, fields in {
        "mamba": {}, "lfm2": {"layer_types": ["conv", "full_attention"]}, "gemma3_text": {}, "mixtral": {}
    }.items():  # fmt: skip
        model = LanguageModel(build(kind, **SMALL | {"hidden_size": 64, "num_hidden_layers": 2} | fields))
        assert model.flops is None, kind


@pytest.mark.parametrize("packing", [True, False])
def test_pairs_of_tokens_are_counted_as_the_masks_of_the_model_have_them(packing: bool) -> None:
    """Tried with the square of the sequence's length: nearly twice as many."""
    task = CausalLM(dataset="x", architecture={**SMALL, "model_type": "llama", "vocab_size": 300}, sequence_length=40,
                    packing=packing)  # fmt: skip
    chunks: list[dict[str, Any]] = [
        {"input_ids": np.arange(n, dtype=np.int32), "labels": np.zeros(n)} for n in (3, 25, 12, 9)
    ]
    sequences = [chunks[:3], [chunks[3]]] if packing else [[chunk] for chunk in chunks]
    batch = task.collate(sequences)
    assert batch["pairs"] == sum(n * (n + 1) // 2 for n in (3, 25, 12, 9))  # of a token with itself, too
    model = task.build_model()
    assert model.flops
    assert task.flops(model, batch) == model.flops.total(49, 49, batch["pairs"])
