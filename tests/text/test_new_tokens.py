"""task.new_tokens: tokens that a model gets, and their rows, which are trained beside adapters."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from src.config.errors import UserError
from src.config.groups import Optim
from src.tasks.text.causal_lm import CausalLM
from src.tasks.text.lora import Lora
from src.tasks.text.pretrained import load_exported
from src.training.optim import build_optimizers
from tests.launching import Run, Whole, slow
from tests.text import tiny

TOKENS = ["<|im_start|>", "<|im_end|>"]
STEPS = (
    "--max_steps=12", "--global_batch_size=8", "--micro_batch_size=2", "--optim.lr=1e-2", "--optim.schedule=constant",
    "--optim.warmup_steps=0", "--optim.weight_decay=0", "--log_every=1",
)  # fmt: skip


@pytest.fixture(scope="session")
def chats(made: Path) -> str:
    """Chats, and models with a tied output layer and with one of its own, of 258 tokens, which know no marks."""
    for name, tied in (("tied", True), ("untied", False)):
        if not (made / "models" / name).exists():
            tiny.saved("llama", made / "models" / name, tie_word_embeddings=tied, **tiny.LLAMA)
    rows = [[{"role": "user", "content": f"say {i}"}, {"role": "assistant", "content": f"{i} {i}"}] for i in range(40)]
    file = made / "chats.jsonl"
    file.write_text("".join(json.dumps({"messages": row}) + "\n" for row in rows))
    return str(file)


def run(whole: Whole, made: Path, chats: str, model: str, yaml: str) -> Run:
    return whole(
        yaml, "--task.name=causal_lm", f"--task.model={made}/models/{model}", f"--task.dataset={chats}",
        "--task.sequence_length=64", "--task.lora.r=4", "--task.lora.merge=true", "--task.chat_template=chatml",
        f"--task.new_tokens=[{','.join(TOKENS)}]", *STEPS,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("model", "yaml"),
    [
        ("tied", "fsdp"),
        ("untied", "fsdp"),
        ("tied", "ddp"),
        *(slow("tied", yaml) for yaml in ("fsdp_grad_op", "fsdp_offload", "hsdp")),
    ],
)
def test_rows_are_trained_beside_adapters_the_same_under_every_strategy(
    whole: Whole, made: Path, chats: str, model: str, yaml: str
) -> None:
    """And nothing else of the first and the last layer is."""
    alone, other = run(whole, made, chats, model, "cpu"), run(whole, made, chats, model, yaml)
    assert other.losses == pytest.approx(alone.losses, rel=1e-5)
    for folder in (alone.folder, other.folder):
        merged: Any = AutoModelForCausalLM.from_pretrained(folder / "model/merged")
        before: Any = AutoModelForCausalLM.from_pretrained(made / "models" / model)
        for layer, old in (
            (merged.get_input_embeddings(), before.get_input_embeddings()),
            (merged.get_output_embeddings(), before.get_output_embeddings()),
        ):
            assert torch.equal(layer.weight[:258], old.weight)
            start = old.weight.mean(0)
            assert all((row - start).norm() > 0.01 for row in layer.weight[258:])


def test_what_is_exported_is_loaded_with_its_tokens(whole: Whole, made: Path, chats: str) -> None:
    """Adapters, which need a larger base, and merged: the same model. It ends where a turn ends."""
    folder = run(whole, made, chats, "tied", "fsdp").folder / "model"
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
def test_rows_start_as_the_mean_of_the_others_and_all_are_trained_without_adapters(
    made: Path, chats: str, name: str
) -> None:
    task = CausalLM(model=f"{made}/models/{name}", dataset=chats, sequence_length=64, new_tokens=TOKENS)
    model = task.build_model()
    for layer in (model.get_input_embeddings(), model.get_output_embeddings()):
        assert layer.weight.shape == (260, 32)
        torch.testing.assert_close(layer.weight[258:], layer.weight[:258].mean(0).expand(2, -1))
    assert all(parameter.requires_grad for parameter in model.parameters())


@pytest.mark.parametrize(("name", "layers"), [("tied", 1), ("untied", 2)])
def test_muon_leaves_them_to_adamw_as_it_does_embeddings(made: Path, chats: str, name: str, layers: int) -> None:
    task = CausalLM(model=f"{made}/models/{name}", sequence_length=64, new_tokens=TOKENS, lora=Lora(r=4))
    _, adamw = build_optimizers(Optim(name="muon"), task.build_model())
    assert [rows.shape for group in adamw.param_groups for rows in group["params"]] == [(2, 32)] * layers


@pytest.mark.parametrize(
    ("tokens", "named"), [(["<|endoftext|>", "<a>"], "<|endoftext|>"), (["<a>", "<a>"], "<a>"), (["a"], "a")]
)
def test_a_token_that_is_there_already_is_one_line(made: Path, chats: str, tokens: list[str], named: str) -> None:
    task = CausalLM(model=f"{made}/models/tied", dataset=chats, sequence_length=64, new_tokens=tokens)
    with pytest.raises(UserError) as error:
        task.build_datasets()
    says = "the tokenizer has it already, or it is listed twice: leave it out"
    assert str(error.value) == f"task.new_tokens: {named}: {says}"
