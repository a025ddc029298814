"""task.new_tokens: tokens that a model gets, and their rows, which are trained beside adapters."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from src.config.errors import UserError
from src.config.groups import Optim
from src.tasks.text.causal_lm import CausalLM
from src.tasks.text.model import Lora, load_exported
from src.training.optim import build_optimizers
from tests.text.conftest import Trained

TOKENS = ["<|im_start|>", "<|im_end|>"]


@pytest.mark.parametrize("model", ["tied", "untied"])
@pytest.mark.parametrize("yaml", ["alone", "fsdp"])
def test_rows_are_trained_beside_adapters_and_nothing_else_of_the_first_and_the_last_layer(
    trained: Trained, models: Path, model: str, yaml: str
) -> None:
    """That of one process and FSDP is the same: test_parity.py."""
    merged: Any = AutoModelForCausalLM.from_pretrained(trained(f"new tokens, {model}", yaml).folder / "model/merged")
    before: Any = AutoModelForCausalLM.from_pretrained(models / model)
    for layer, old in (
        (merged.get_input_embeddings(), before.get_input_embeddings()),
        (merged.get_output_embeddings(), before.get_output_embeddings()),
    ):
        assert torch.equal(layer.weight[:258], old.weight)
        start = old.weight.mean(0)
        assert all((row - start).norm() > 0.01 for row in layer.weight[258:])


def test_what_is_exported_is_loaded_with_its_tokens(trained: Trained) -> None:
    """Adapters, which need a larger base, and merged: the same model. It ends where a turn ends."""
    folder = trained("new tokens, tied", "fsdp").folder / "model"
    tokenizer: Any = AutoTokenizer.from_pretrained(folder)
    merged: Any = AutoModelForCausalLM.from_pretrained(folder / "merged")
    text = tokenizer.apply_chat_template([{"role": "user", "content": "say 5"}], tokenize=False)
    assert text == "<|im_start|>user\nsay 5<|im_end|>\n"
    tokens = tokenizer(text, add_special_tokens=False, return_tensors="pt")["input_ids"]
    assert tokens[0, 0] == 258
    with torch.no_grad():
        logits = [model(input_ids=tokens).logits for model in (load_exported(folder), merged)]
    # fp32: 2 x 32 products in each of some ten sums
    torch.testing.assert_close(*logits, rtol=1e-4, atol=1e-5)
    assert tokenizer.eos_token == "<|im_end|>"
    for export in (folder, folder / "merged"):
        assert GenerationConfig.from_pretrained(export).eos_token_id == [259, 256]


@pytest.mark.parametrize("name", ["tied", "untied"])
def test_rows_start_as_the_mean_of_the_others_and_all_are_trained_without_adapters(models: Path, name: str) -> None:
    task = CausalLM(model=f"{models}/{name}", sequence_length=64, new_tokens=TOKENS)
    model = task.build_model()
    for layer in (model.get_input_embeddings(), model.get_output_embeddings()):
        assert layer.weight.shape == (260, 32)
        torch.testing.assert_close(layer.weight[258:], layer.weight[:258].mean(0).expand(2, -1))
    assert all(parameter.requires_grad for parameter in model.parameters())


@pytest.mark.parametrize(("name", "layers"), [("tied", 1), ("untied", 2)])
def test_muon_leaves_them_to_adamw_as_it_does_embeddings(models: Path, name: str, layers: int) -> None:
    task = CausalLM(model=f"{models}/{name}", sequence_length=64, new_tokens=TOKENS, lora=Lora(r=4))
    _, adamw = build_optimizers(Optim(name="muon"), task.build_model())
    assert [rows.shape for group in adamw.param_groups for rows in group["params"]] == [(2, 32)] * layers


def test_adapters_of_the_layers_that_have_them_are_one_line(models: Path) -> None:
    lora = Lora(r=4, target_modules=["lm_head"])
    task = CausalLM(model=f"{models}/untied", sequence_length=64, new_tokens=TOKENS, lora=lora)
    with pytest.raises(UserError, match="^task.lora.target_modules, exclude_modules: [^\\n]*cannot be applied[^\\n]*$"):
        task.build_model()


@pytest.mark.parametrize(
    ("tokens", "named"), [(["<|endoftext|>", "<a>"], "<|endoftext|>"), (["<a>", "<a>"], "<a>"), (["a"], "a")]
)
def test_a_token_that_is_there_already_is_one_line(made: Path, tokens: list[str], named: str) -> None:
    task = CausalLM(model=f"{made}/models/tied", dataset=f"{made}/chats.jsonl", sequence_length=64, new_tokens=tokens)
    with pytest.raises(UserError) as error:
        task.build_datasets()
    says = "the tokenizer has it already, or it is listed twice: leave it out"
    assert str(error.value) == f"task.new_tokens: {named}: {says}"
