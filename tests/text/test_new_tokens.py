"""task.new_tokens: tokens that a model gets, and their rows, which are trained beside adapters."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from src.config.groups import Optim
from src.tasks.text.model import load_exported
from src.training.optim import build_optimizers
from tests.launching import slow
from tests.text import tiny
from tests.text.conftest import Trained
from tests.text.tasks import SMOLLM2


@pytest.mark.parametrize(
    ("name", "base"),
    [("new tokens, tied", "tied"), ("new tokens, untied", "untied"), slow("chat with new tokens", SMOLLM2)],
)
def test_only_the_rows_of_new_tokens_are_trained(trained: Trained, models: Path, name: str, base: str) -> None:
    """That of one process has the same curve: test_parity.py."""
    folder = trained(name, "fsdp").folder / "model"
    auto: Any = AutoModelForCausalLM
    before, merged = (auto.from_pretrained(where, dtype=torch.float32) for where in (models / base, folder / "merged"))
    for layer, old in (
        (merged.get_input_embeddings(), before.get_input_embeddings()),
        (merged.get_output_embeddings(), before.get_output_embeddings()),
    ):
        number = len(old.weight)
        assert torch.equal(layer.weight[:number], old.weight)
        assert len(layer.weight) == number + 2
        assert ((layer.weight[number:] - old.weight.mean(0)).norm(dim=1) > 0.01).all()
    tokenizer: Any = AutoTokenizer.from_pretrained(folder)
    assert sorted(tokenizer.get_added_vocab().values())[-2:] == [number, number + 1]


def test_what_is_exported_is_loaded_with_its_tokens(trained: Trained) -> None:
    """Adapters, which need a larger base, and merged: the same model. It ends where a turn ends."""
    folder = trained("new tokens, tied", "fsdp").folder / "model"
    tokenizer: Any = AutoTokenizer.from_pretrained(folder)
    text = tokenizer.apply_chat_template([{"role": "user", "content": "say 5"}], tokenize=False)
    assert text == "<|im_start|>user\nsay 5<|im_end|>\n"
    tokens = tokenizer(text, add_special_tokens=False, return_tensors="pt")["input_ids"]
    assert tokens[0, 0] == 258
    merged: Any = AutoModelForCausalLM.from_pretrained(folder / "merged")
    with torch.no_grad():
        logits = [model(input_ids=tokens).logits for model in (load_exported(folder), merged)]
    # fp32: 2 x 32 products in each of some ten sums
    torch.testing.assert_close(*logits, rtol=1e-4, atol=1e-5)
    assert tokenizer.eos_token == "<|im_end|>"
    for export in (folder, folder / "merged"):
        assert GenerationConfig.from_pretrained(export).eos_token_id == [259, 256]


@pytest.mark.parametrize(("name", "layers"), [("tied", 1), ("untied", 2)])
def test_rows_start_as_the_mean_of_the_others(models: Path, name: str, layers: int) -> None:
    """Muon leaves them to AdamW, as it does embeddings."""
    settings: Any = {"model": f"{models}/{name}", "sequence_length": 64, "new_tokens": ["<|im_start|>", "<|im_end|>"]}
    model = tiny.task(**settings).build_model()
    for layer in (model.get_input_embeddings(), model.get_output_embeddings()):
        assert layer.weight.shape == (260, 32)
        torch.testing.assert_close(layer.weight[258:], layer.weight[:258].mean(0).expand(2, -1))
    assert all(parameter.requires_grad for parameter in model.parameters())
    _, adamw = build_optimizers(Optim(name="muon"), tiny.task(**settings, lora={"r": 4}).build_model())
    assert [rows.shape for group in adamw.param_groups for rows in group["params"]] == [(2, 32)] * layers
