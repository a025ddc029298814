"""Transformers as whole runs: compiled, packed or not, and in half precision they have the same curve, and others load
what they export; adapters, over frozen weights in 4 bits too, and beside rows of new tokens."""

import importlib.metadata
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub import ModelCard
from safetensors.torch import load_file
from torch.nn import functional as F
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig, PreTrainedModel, pipeline

from src.config.errors import UserError
from src.config.groups import Optim
from src.tasks.base import TaskState
from src.tasks.text.load import load_exported
from src.training.optim import build_optimizers
from tests.faults.runs import cut_back, whole_tensors
from tests.launching import Launch, slow
from tests.text import tiny
from tests.text.conftest import Trained
from tests.text.tasks import SMOLLM2, TEXT

BF16: Any = {"launcher_arguments": ("--mixed_precision=bf16",)}
IN_4_BITS = "lm in 4 bits"
auto: Any = AutoModelForCausalLM


# ------------------------------------------------------------------------------------------------------------- curves
@pytest.mark.slow
def test_a_compiled_model_has_the_same_curve(trained: Trained) -> None:
    arguments = ("lm", "fsdp_grad_op", "--compile=true", "--max_steps=2")
    run = trained(*arguments, TORCHINDUCTOR_DEBUG_COMPILE="1")  # compiles without optimizing
    assert "compile" in run.stdout
    assert run.losses == pytest.approx(trained("lm").losses[:2], rel=1e-5)


def test_packed_or_not_the_curve_is_the_same(trained: Trained) -> None:
    """Each step takes all 107 documents, so that one of two processes ends with a dummy batch. From scratch, each
    process builds the whole model first, which is logged."""
    steps = (
        "--task.eval_fraction=0.11",
        "--global_batch_size=212",
        "--micro_batch_size=53",
        "--max_steps=2",
        "--log_every=2",
    )
    packed = trained("scratch", "alone", *steps)
    apart = trained("scratch", "fsdp", *steps, "--task.packing=false")
    assert packed.losses == pytest.approx(apart.losses, rel=1e-5)
    for name in ("eval/loss", "eval/accuracy"):
        assert packed.summary[name] == pytest.approx(apart.summary[name], rel=1e-5)
    sequences, documents = (run.summary["data"]["train"]["sequences"] for run in (packed, apart))
    assert sequences < documents / 2
    assert apart.summary["built_whole"]
    assert "each process built the whole model first" in apart.stdout


@pytest.mark.parametrize("strategy", [slow("cpu"), "fsdp"])
def test_steps_that_overflow_in_fp16_are_skipped(trained: Trained, strategy: str) -> None:
    arguments = ("--task.architecture.model_type=granite", "--task.architecture.logits_scaling=0.01",
                 "--global_batch_size=64", "--micro_batch_size=32", "--optim.schedule=linear",
                 "--optim.final_lr_ratio=0")  # fmt: skip
    run = trained("scratch", strategy, *arguments, launcher_arguments=("--mixed_precision=fp16",))
    training = [record for record in run.records if "train/loss" in record]
    skipped = run.summary["skipped_steps"]
    assert 0 < skipped < 8
    assert training[-1]["train/loss_scale"] == 2.0 ** (16 - skipped)
    assert [record["train/lr"] for record in training] == pytest.approx([1e-3 * (1 - i / 12) for i in range(12)])
    assert run.losses[skipped] == pytest.approx(run.losses[0], rel=0.02)  # nothing was learnt meanwhile
    assert run.losses[-1] < run.losses[0]


@pytest.mark.parametrize("strategy", [slow("ddp"), "fsdp_offload"])
def test_in_bf16_the_curve_stays_near_that_of_fp32(trained: Trained, strategy: str) -> None:
    run, alone = trained("lm", strategy, "--micro_batch_size=4", **BF16), trained("lm")
    assert run.losses == pytest.approx(alone.losses, rel=2e-3)
    assert run.losses != pytest.approx(alone.losses, rel=1e-7)  # it is not fp32 under another name
    assert run.summary["eval/loss"] == pytest.approx(alone.summary["eval/loss"], rel=2e-3)
    assert {weight.dtype for weight in load_file(run.folder / "model/model.safetensors").values()} == {torch.float32}


def test_fp8_trains_and_exports_fp32_weights(trained: Trained, models: Path) -> None:
    """It is emulated on the CPU."""
    fp8 = {"processes": 1, "launcher_arguments": ("--mixed_precision=fp8",)}
    run = trained("lm", "fsdp_fp8", "--optim.lr=1e-4", "--max_steps=3", **fp8)
    assert run.summary["precision"] == "fp8"
    before, after = (load_file(folder / "model.safetensors") for folder in (models / "llama", run.folder / "model"))
    for name, weight in after.items():
        assert weight.dtype == torch.float32
        assert 0 < (weight - before[name]).norm() < 0.1 * before[name].norm()


def test_adapters_on_bf16_weights_train_as_on_one_process(trained: Trained) -> None:
    arguments = ("--task.lora.base_dtype=bf16", "--optim.lr=1e-2", "--max_steps=6")
    one, two = (trained("lm with adapters", yaml, *arguments, **BF16) for yaml in ("alone", "fsdp"))
    assert two.losses == pytest.approx(one.losses, rel=torch.finfo(torch.bfloat16).eps / 2)
    merged = load_file(two.folder / "model/merged/model.safetensors")
    assert {weight.dtype for weight in merged.values()} == {torch.bfloat16}


# ------------------------------------------------------------------------------------------------------------ exports
def evaluated(model: PreTrainedModel, tokenizer: Any, made: Path) -> float:
    """Return the loss on the completions of the evaluation rows, one by one, with nothing but transformers."""
    rows = [json.loads(line) for line in (made / "questions.jsonl").read_text().splitlines()]
    losses = []
    for row in rows[-12:]:
        prompt, completion = (tokenizer(row[name], add_special_tokens=False)["input_ids"] for name in row)
        tokens = torch.tensor([tokenizer.bos_token_id, *prompt, *completion, tokenizer.eos_token_id])
        with torch.no_grad():
            logits = model(tokens[None]).logits[0, len(prompt) : -1]
        losses.append(F.cross_entropy(logits, tokens[len(prompt) + 1 :], reduction="none"))
    return torch.cat(losses).mean().item()


TOKENIZER = {"README.md", "chat_template.jinja", "generation_config.json", "tokenizer.json", "tokenizer_config.json"}
EXPORT = TOKENIZER | {"config.json", "model.safetensors"}
ADAPTERS = TOKENIZER | {"adapter_config.json", "adapter_model.safetensors", "merged"}


@pytest.mark.parametrize(
    ("kind", "exports"),
    [
        ("lm", {"": (EXPORT, "transformers")}),
        ("experts", {"": (EXPORT, "transformers")}),  # apart in files, together in the model
        ("lm with adapters", {"": (ADAPTERS, "peft"), "merged": (EXPORT, "transformers")}),
        ("lm with DoRA", {"merged": (EXPORT, "transformers")}),
        ("lm with PiSSA", {"": (EXPORT, "transformers")}),
    ],
)
def test_the_export_is_what_was_trained(trained: Trained, made: Path, kind: str, exports: dict[str, Any]) -> None:
    run = trained(kind, "fsdp")
    for place, (names, library) in exports.items():
        folder = run.folder / "model" / place
        assert {path.name for path in folder.iterdir()} == names
        loss = evaluated(auto.from_pretrained(folder), AutoTokenizer.from_pretrained(folder), made)
        assert loss == pytest.approx(run.summary["eval/loss"], rel=1e-5)
        assert GenerationConfig.from_pretrained(folder).eos_token_id in (256, [256])
        card = ModelCard.load(folder / "README.md")
        assert (card.data.library_name, card.data.pipeline_tag) == (library, "text-generation")
        assert f"| eval/loss | {run.summary['eval/loss']:.6g} |" in card.text
    assert run.summary["eval/perplexity"] == pytest.approx(math.exp(run.summary["eval/loss"]))


@pytest.mark.parametrize("kind", [slow("classifier"), "classifier with adapters"])
def test_an_exported_classifier_knows_its_labels(trained: Trained, made: Path, kind: str) -> None:
    """Adapters are merged into it."""
    run = trained(kind, "fsdp")
    classify: Any = pipeline("text-classification", str(run.folder / "model"), top_k=None)
    rows = [line.split("\t") for line in (made / "reviews" / "dev.tsv").read_text().splitlines()[1:]]
    losses = [
        -math.log(found["score"]) for text, label in rows for found in classify([text])[0] if found["label"] == label
    ]
    assert run.summary["eval/examples"] == len(losses) == 37
    assert sum(losses) / len(rows) == pytest.approx(run.summary["eval/loss"], rel=1e-5)


def test_adapters_are_saved_and_resumed_without_the_model_they_adapt(
    launch: Launch, trained: Trained, shared: Path, models: Path, tmp_path: Path
) -> None:
    """They are refused beside another one."""
    folder = cut_back(trained("lm with adapters", "fsdp"), tmp_path / "run", 8)
    shards = (folder / "checkpoints" / "step_00000008").glob("shard-*")
    assert sum(shard.stat().st_size for shard in shards) < (models / "llama/model.safetensors").stat().st_size
    others = (f"--task.model={tiny.llama(tmp_path / 'other', seed=1)}", "--checkpoint.accept_changes=true")
    other = TEXT["lm with adapters"].ready(shared).run(launch, "fsdp", *others, folder=folder)
    assert "belongs to a different base model (norm of frozen weights: " in str(other.messages)


# ------------------------------------------------------------------------------------------------- weights in 4 bits
def in_4_bits(model: Path) -> Any:
    return tiny.task(model=str(model), sequence_length=16, lora={"r": 4, "base_dtype": "nf4"})


def test_weights_in_4_bits_take_at_most_0_6_bytes_each(tmp_path: Path) -> None:
    """Scales included. Other frozen weights are bf16, and adapters fp32."""
    wide = tiny.LLAMA | {"hidden_size": 128, "intermediate_size": 256}  # the table that each layer has is small
    lm = in_4_bits(tiny.saved("llama", tmp_path / "wide", **wide)).build_model()
    base = [layer for layer in lm.modules() if hasattr(layer, "quant_state")]
    assert {layer.support_avx512bf16_for_cpu for layer in base} == {False}  # or an evaluation ends their gradients
    held = sum(tensor.nbytes for layer in base for tensor in layer.state_dict().values())
    assert len(base) == 14
    assert 0.5 < held / sum(layer.in_features * layer.out_features for layer in base) <= 0.6
    others = {p.dtype for name, p in lm.named_parameters() if not p.requires_grad and "base_layer" not in name}
    assert others == {torch.bfloat16}
    assert {p.dtype for p in lm.parameters() if p.requires_grad} == {torch.float32}


def test_the_loss_over_4_bits_is_within_5_percent_of_bf16s(trained: Trained) -> None:
    """Adapters alone are saved and exported."""
    bf16, nf4 = trained(IN_4_BITS, "alone", "--task.lora.base_dtype=bf16"), trained(IN_4_BITS)
    assert nf4.losses != bf16.losses
    assert len(nf4.losses) == 50
    assert nf4.losses[-1] == pytest.approx(bf16.losses[-1], rel=0.05)
    assert nf4.losses[-1] < nf4.losses[0] - 0.5
    assert "frozen weights in nf4" in nf4.stdout
    assert all(".lora_" in name for name in whole_tensors(nf4.folder / "checkpoints/step_00000050"))
    assert all(".lora_" in name for name in load_file(nf4.folder / "model/adapter_model.safetensors"))


def test_4_bits_are_refused_in_fp32_under_fsdp_or_without_bitsandbytes(
    models: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    task, setting = in_4_bits(models / "spread"), "^task.lora.base_dtype=nf4: "
    with pytest.raises(UserError, match=f"{setting}needs --mixed_precision bf16 before train.py$"):
        task.bind(TaskState())
    with pytest.raises(UserError, match=f"{setting}FSDP cannot shard 4-bit weights .* or task.lora.base_dtype=bf16$"):
        task.build_empty_model()
    monkeypatch.setattr(importlib.metadata, "distributions", lambda name: [])
    with pytest.raises(UserError, match=rf"{setting}not installed: bitsandbytes: .*\[nf4\]'$"):
        task.build_model()


# --------------------------------------------------------------------------------------------------------- new tokens
@pytest.mark.parametrize(
    ("name", "base"),
    [("new tokens, tied", "tied"), ("new tokens, untied", "untied"), slow("chat with new tokens", SMOLLM2)],
)
def test_only_the_rows_of_new_tokens_are_trained(trained: Trained, models: Path, name: str, base: str) -> None:
    folder = trained(name, "fsdp").folder / "model"
    before, merged = (auto.from_pretrained(where, dtype=torch.float32) for where in (models / base, folder / "merged"))
    for layer in ("get_input_embeddings", "get_output_embeddings"):
        old, new = (getattr(model, layer)().weight for model in (before, merged))
        number = len(old)
        assert torch.equal(new[:number], old)
        assert len(new) == number + 2
        assert ((new[number:] - old.mean(0)).norm(dim=1) > 0.01).all()
    tokenizer: Any = AutoTokenizer.from_pretrained(folder)
    assert sorted(tokenizer.get_added_vocab().values())[-2:] == [number, number + 1]
    tokens = torch.tensor([[0, 1, number, 2, number + 1]])
    with torch.no_grad():  # adapters, which need a larger base, and merged: the same model
        logits = [model(input_ids=tokens).logits for model in (load_exported(folder), merged)]
    # fp32: 2 x 32 products in each of some ten sums
    torch.testing.assert_close(*logits, rtol=1e-4, atol=1e-5)
    for export in (folder, folder / "merged") if base != SMOLLM2 else ():
        assert GenerationConfig.from_pretrained(export).eos_token_id == [259, 256]  # where a turn ends


@pytest.mark.parametrize(("name", "layers"), [("tied", 1), ("untied", 2)])
def test_new_rows_start_as_the_mean_of_the_others(models: Path, name: str, layers: int) -> None:
    """Muon leaves them to AdamW, as it does embeddings."""
    settings: Any = {"model": f"{models}/{name}", "sequence_length": 64, "new_tokens": ["<|im_start|>", "<|im_end|>"]}
    model = tiny.task(**settings).build_model()
    for layer in (model.get_input_embeddings(), model.get_output_embeddings()):
        assert layer.weight.shape == (260, 32)
        torch.testing.assert_close(layer.weight[258:], layer.weight[:258].mean(0).expand(2, -1))
    assert all(parameter.requires_grad for parameter in model.parameters())
    _, adamw = build_optimizers(Optim(name="muon"), tiny.task(**settings, lora={"r": 4}).build_model())
    assert [rows.shape for group in adamw.param_groups for rows in group["params"]] == [(2, 32)] * layers
