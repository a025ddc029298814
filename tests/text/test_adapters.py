"""Adapters: their checkpoints, over frozen weights in 4 bits (by bitsandbytes), and beside rows of new tokens."""

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from src.config.errors import UserError
from src.config.groups import Optim
from src.tasks.base import TaskState
from src.tasks.text import model
from src.tasks.text.model import load_exported
from src.training.optim import build_optimizers
from tests.faults.runs import cut_back, whole_tensors
from tests.launching import Launch, slow
from tests.text import tiny
from tests.text.conftest import Trained
from tests.text.tasks import SMOLLM2, TEXT

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")  # in this process, to read
WIDE = tiny.LLAMA | {"hidden_size": 128, "intermediate_size": 256}
"""Sizes of layers beside which the tables that each has in common are small."""
NAME = "lm in 4 bits"


def task(folder: Path) -> Any:
    return tiny.task(model=str(folder), sequence_length=16, lora={"r": 4, "base_dtype": "nf4"})


def test_the_base_takes_half_a_byte_for_a_weight_and_adapters_are_fp32(tmp_path: Path) -> None:
    """With its scales. Embedding, norms and output are bf16. On a CPU with AVX512-BF16, bitsandbytes would reorder the
    weights in an evaluation, for kernels without a backward pass."""
    lm = task(tiny.saved("llama", tmp_path / "wide", **WIDE)).build_model()
    base = [layer for layer in lm.modules() if hasattr(layer, "quant_state")]
    assert {layer.support_avx512bf16_for_cpu for layer in base} == {False}
    held = sum(tensor.nbytes for layer in base for tensor in layer.state_dict().values())
    weights = sum(layer.in_features * layer.out_features for layer in base)
    assert len(base) == 14
    assert 0.5 < held / weights <= 0.6
    others = {p.dtype for name, p in lm.named_parameters() if not p.requires_grad and "base_layer" not in name}
    assert others == {torch.bfloat16}
    assert {p.dtype for p in lm.parameters() if p.requires_grad} == {torch.float32}


@pytest.mark.parametrize(
    ("name", "few", "last", "within"),
    [(NAME, [], 1, 0.05), slow("chat", ["--max_steps=2", "--task.lora.merge=false"], 2, 0.1)],
)
def test_the_loss_is_near_a_bf16_bases(trained: Trained, name: str, few: list[str], last: int, within: float) -> None:
    """After 50 steps, within 5%; of the chat model's real weights within 10%, before a step and after it."""
    bf16, nf4 = (
        trained(name, "alone", *few, *base, launcher_arguments=("--mixed_precision=bf16",))
        for base in (["--task.lora.base_dtype=bf16"], [] if name == NAME else ["--task.lora.base_dtype=nf4"])
    )
    assert nf4.losses != bf16.losses
    assert nf4.losses[-last:] == pytest.approx(bf16.losses[-last:], rel=within)
    if name == NAME:
        assert len(nf4.losses) == 50
        assert nf4.losses[-1] < nf4.losses[0] - 0.5
    assert "frozen weights in nf4" in nf4.stdout


def test_adapters_alone_are_saved_and_the_merged_model_is_dense(trained: Trained, models: Path) -> None:
    """It is the sum of what the 4 bits stand for and the adapters, and gives the losses of the evaluation."""
    folder = trained(NAME).folder
    assert all(".lora_" in name for name in whole_tensors(folder / "checkpoints/step_00000050"))
    with safe_open(folder / "model/adapter_model.safetensors", "pt") as file:
        assert all(".lora_" in name for name in file.keys())  # noqa: SIM118  # it is no dictionary
    quantized = task(models / "spread").load_export(folder / "model")
    merged: Any = AutoModelForCausalLM.from_pretrained(folder / "model/merged", dtype=torch.float32)
    tokens = torch.arange(32)[None]
    with torch.no_grad():
        expected = quantized.lm(input_ids=tokens).logits
        found = merged(input_ids=tokens).logits
    # both are rounded to bf16, of 8 bits, in a dozen places
    assert (found - expected).norm() < 0.05 * expected.norm()
    assert not any("absmax" in name for name in merged.state_dict())


def test_what_cannot_be_in_4_bits(shared: Path, models: Path, launch: Launch, monkeypatch: pytest.MonkeyPatch) -> None:
    refused = TEXT[NAME].ready(shared).run(launch, "fsdp_cp")
    assert refused.exit_code == 2
    assert refused.messages[0] == (
        "train.py: task.lora.base_dtype=nf4: FSDP cannot shard 4-bit weights (bitsandbytes issue 1945); use "
        "accelerate_configs/ddp.yaml or single_gpu.yaml, or task.lora.base_dtype=bf16"
    )
    with pytest.raises(UserError, match="^task.lora.base_dtype=nf4: needs --mixed_precision bf16 before train.py$"):
        task(models / "spread").begin(TaskState())
    monkeypatch.setattr(model, "is_bnb_4bit_available", lambda: False)
    with pytest.raises(
        UserError, match="^task.lora.base_dtype=nf4: needs bitsandbytes; `pip install -e '.\\[nf4\\]'`$"
    ):
        task(models / "spread").build_model()


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


def test_adapters_are_saved_without_the_model_that_they_adapt(
    launch: Launch, trained: Trained, shared: Path, models: Path, tmp_path: Path
) -> None:
    """And go on beside no others. Tried with saving frozen weights too, and without comparing their norm."""
    folder = cut_back(trained("lm with adapters", "fsdp"), tmp_path / "run", 8)
    shards = (folder / "checkpoints" / "step_00000008").glob("shard-*")
    assert sum(shard.stat().st_size for shard in shards) < os.path.getsize(models / "llama" / "model.safetensors")
    others = (f"--task.model={tiny.llama(tmp_path / 'other', seed=1)}", "--checkpoint.accept_changes=true")
    other = TEXT["lm with adapters"].ready(shared).run(launch, "fsdp", *others, folder=folder)
    assert "was trained with other frozen weights" in str(other.messages)
