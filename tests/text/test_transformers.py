"""Transformers as whole runs: packed, compiled and in half precision, and an export that others load; adapters: their
checkpoints, over frozen weights in 4 bits (by bitsandbytes), and beside rows of new tokens."""

import importlib.metadata
import json
import math
import os
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from huggingface_hub import ModelCard
from safetensors import safe_open
from safetensors.torch import load_file
from torch.nn import functional as F
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig, PreTrainedModel, pipeline

from src.config.errors import UserError
from src.config.groups import Optim
from src.tasks.base import TaskState
from src.tasks.text.load import load_exported
from src.training.optim import build_optimizers
from tests.faults.runs import cut_back, whole_tensors
from tests.launching import Launch, Run, slow
from tests.text import tiny
from tests.text.conftest import Trained
from tests.text.tasks import SMOLLM2, TEXT

UNTRANSLATED = "import functools, torch\ntorch.compile = functools.partial(torch.compile, backend='aot_eager')"
"""As a compiler, but for the translation into C++, which takes a minute."""
A_PEAK = "import src.tracking.performance; src.tracking.performance.peak_flops = lambda name, precision: 1e12"
BF16: Any = {"launcher_arguments": ("--mixed_precision=bf16",)}


@pytest.mark.parametrize("before", [UNTRANSLATED, slow("")], ids=["as a graph", "with a compiler"])
def test_compiled_it_is_the_same_too(trained: Trained, before: str) -> None:
    unoptimized = {"TORCHINDUCTOR_DEBUG_COMPILE": "1"}
    run = trained("lm", "fsdp_grad_op", "--compile=true", "--max_steps=2", before=before, **unoptimized)
    assert "compile" in run.stdout
    assert run.losses == pytest.approx(trained("lm").losses[:2], rel=1e-5)


def test_packed_or_not_the_loss_and_the_operations_of_the_same_documents_are_the_same(trained: Trained) -> None:
    """Each step takes all 107 documents, so that one of two processes ends with a dummy batch. Tried without its
    weight: more operations there. From scratch, each process builds the whole model first, which is said."""
    steps = (
        "--task.eval_fraction=0.11", "--global_batch_size=212", "--micro_batch_size=53", "--max_steps=2",
        "--log_every=2",
    )  # fmt: skip
    packed = trained("scratch", "alone", *steps, before=A_PEAK)
    apart = trained("scratch", "fsdp", *steps, "--task.packing=false", before=A_PEAK)
    assert packed.losses == pytest.approx(apart.losses, rel=1e-5)
    for name in ("eval/loss", "eval/accuracy"):
        assert packed.summary[name] == pytest.approx(apart.summary[name], rel=1e-5)
    sequences, more = (run.summary["data"]["train"]["sequences"] for run in (packed, apart))
    assert sequences < more / 2
    assert apart.summary["built_whole"]
    assert "each process built the whole model first" in apart.stdout
    assert operations(apart) == pytest.approx(operations(packed))


def operations(run: Run) -> float:
    """Those of the last step, by perf/mfu."""
    record = next(record for record in run.records if "perf/mfu" in record)
    seconds = sum(record.get(f"perf/{name}_seconds", 0.0) for name in ("data", "compute", "waiting"))
    return record["perf/mfu"] * seconds * run.summary["num_processes"]


@pytest.mark.parametrize("strategy", [slow("cpu"), "fsdp"])
def test_in_fp16_steps_that_overflow_are_skipped(trained: Trained, strategy: str) -> None:
    steep = ("--task.architecture.model_type=granite", "--task.architecture.logits_scaling=0.01")
    arguments = (*steep, "--global_batch_size=64", "--micro_batch_size=32", "--optim.schedule=linear")
    decayed = "--optim.final_lr_ratio=0"
    run = trained("scratch", strategy, *arguments, decayed, launcher_arguments=("--mixed_precision=fp16",))
    assert run.summary["precision"] == "fp16"
    training = [record for record in run.records if "train/loss" in record]
    skipped = run.summary["skipped_steps"]
    assert 0 < skipped < 8
    assert training[-1]["train/loss_scale"] == 2.0 ** (16 - skipped)
    rates = [record["train/lr"] for record in training]
    assert rates == pytest.approx([1e-3 * (1 - i / 12) for i in range(12)])
    assert run.losses[skipped] == pytest.approx(run.losses[0], rel=0.02)  # nothing was learnt meanwhile
    assert run.losses[-1] < run.losses[0]


@pytest.mark.parametrize("strategy", [slow("ddp"), "fsdp_offload"])
def test_in_bf16_the_curve_stays_near_that_of_fp32(trained: Trained, strategy: str) -> None:
    run, alone = trained("lm", strategy, "--micro_batch_size=4", **BF16), trained("lm")
    assert run.summary["precision"] == "bf16"
    assert run.losses == pytest.approx(alone.losses, rel=2e-3)
    assert run.losses != pytest.approx(alone.losses, rel=1e-7)  # it is not fp32 under another name
    assert run.summary["eval/loss"] == pytest.approx(alone.summary["eval/loss"], rel=2e-3)
    weights = load_file(run.folder / "model" / "model.safetensors")
    assert {weight.dtype for weight in weights.values()} == {torch.float32}


def test_fp8_trains_and_exports_fp32_weights(trained: Trained, models: Path) -> None:
    """Emulated on the CPU, on one process, whose weights keep torchao's wrapper; it can't be saved, which was tried."""
    fp8 = {"processes": 1, "launcher_arguments": ("--mixed_precision=fp8",)}
    run = trained("lm", "fsdp_fp8", "--optim.lr=1e-4", "--max_steps=3", **fp8)
    assert run.summary["precision"] == "fp8"
    before, after = (load_file(folder / "model.safetensors") for folder in (models / "llama", run.folder / "model"))
    for name, weight in after.items():
        assert weight.dtype == torch.float32
        assert 0 < (weight - before[name]).norm() < 0.1 * before[name].norm()


def test_adapters_on_bf16_weights_train_as_on_one_process(trained: Trained, models: Path) -> None:
    """Numbers in bf16 are off by up to half of its eps each; the losses are means of many, and 6e-6 apart."""
    how = ("--task.lora.base_dtype=bf16", "--optim.lr=1e-2", "--max_steps=6")
    one, two = (trained("lm with adapters", yaml, *how, **BF16) for yaml in ("alone", "fsdp"))
    assert two.losses == pytest.approx(one.losses, rel=torch.finfo(torch.bfloat16).eps / 2)
    merged = [load_file(run.folder / "model" / "merged" / "model.safetensors") for run in (one, two)]
    assert merged[0].keys() == merged[1].keys()
    before = load_file(models / "llama" / "model.safetensors")
    for name, weight in merged[1].items():
        assert weight.dtype == torch.bfloat16
        assert (weight - merged[0][name]).norm() <= 0.02 * (merged[0][name] - before[name]).norm() + 1e-2, name


def evaluated(model: PreTrainedModel, tokenizer: Any, made: Path) -> float:
    """The loss on the completions of the evaluation rows, document by document, with nothing but transformers."""
    rows = [json.loads(line) for line in (made / "questions.jsonl").read_text().splitlines()]
    losses = []
    for row in rows[-12:]:
        prompt, completion = (tokenizer(row[name], add_special_tokens=False)["input_ids"] for name in row)
        tokens = torch.tensor([tokenizer.bos_token_id, *prompt, *completion, tokenizer.eos_token_id])
        with torch.no_grad():
            logits = model(tokens[None]).logits[0, len(prompt) : -1]
        losses.append(F.cross_entropy(logits, tokens[len(prompt) + 1 :], reduction="none"))
    return torch.cat(losses).mean().item()


@pytest.mark.parametrize("kind", ["lm", "experts", "lm with adapters"])
def test_the_export_is_what_was_trained(trained: Trained, made: Path, kind: str) -> None:
    """Experts are apart in files and together in the model. Adapters are exported alone, and on request merged."""
    run = trained(kind, "fsdp")
    folder = run.folder / "model"
    tokenizer = {"README.md", "chat_template.jinja", "tokenizer.json", "tokenizer_config.json"}
    whole = tokenizer | {"config.json", "generation_config.json", "model.safetensors"}
    exports = {folder: (whole, "transformers")}
    if kind == "lm with adapters":
        assert run.summary["trained_parameters"] < run.summary["parameters"] / 4
        adapters = tokenizer | {"adapter_config.json", "adapter_model.safetensors", "generation_config.json", "merged"}
        exports = {folder: (adapters, "peft"), folder / "merged": (whole, "transformers")}
    for exported, (names, library) in exports.items():
        assert {path.name for path in exported.iterdir()} == names
        model = AutoModelForCausalLM.from_pretrained(exported)
        assert evaluated(model, AutoTokenizer.from_pretrained(exported), made) == pytest.approx(
            run.summary["eval/loss"], rel=1e-5
        )
        assert GenerationConfig.from_pretrained(exported).eos_token_id in (256, [256])
        assert ModelCard.load(exported / "README.md").data.library_name == library
    assert run.summary["eval/perplexity"] == pytest.approx(math.exp(run.summary["eval/loss"]))
    card = (folder / "README.md").read_text()
    expected = {"library_name": library if len(exports) == 1 else "peft", "pipeline_tag": "text-generation"}
    assert expected.items() <= yaml.safe_load(card.split("---")[1]).items()
    assert f"| eval/loss | {run.summary['eval/loss']:.6g} |" in card


@pytest.mark.parametrize("kind", [slow("classifier"), "classifier with adapters"])
def test_an_exported_classifier_knows_its_labels(trained: Trained, made: Path, kind: str) -> None:
    """Where adapters were trained, they are merged into it."""
    run = trained(kind, "fsdp")
    classify: Any = pipeline("text-classification", str(run.folder / "model"), top_k=None)
    rows = [line.split("\t") for line in (made / "reviews" / "dev.tsv").read_text().splitlines()[1:]]
    assert run.summary["eval/examples"] == len(rows) == 37
    losses = []
    for text, label in rows:
        (found,) = classify([text])
        losses += [-math.log(share["score"]) for share in found if share["label"] == label]
    assert sum(losses) / len(rows) == pytest.approx(run.summary["eval/loss"], rel=1e-5)


WIDE = tiny.LLAMA | {"hidden_size": 128, "intermediate_size": 256}
"""Sizes of layers beside which the tables that each has in common are small."""
NAME = "lm in 4 bits"


def task(folder: Path) -> Any:
    return tiny.task(model=str(folder), sequence_length=16, lora={"r": 4, "base_dtype": "nf4"})


def test_the_base_takes_half_a_byte_for_a_weight_and_adapters_are_fp32(tmp_path: Path) -> None:
    """With its scales. Others are bf16. With AVX512-BF16, bitsandbytes would reorder weights in an evaluation."""
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


def test_the_loss_is_near_a_bf16_bases(trained: Trained) -> None:
    """Within 5%, after 50 steps."""
    bf16 = trained(NAME, "alone", "--task.lora.base_dtype=bf16", launcher_arguments=("--mixed_precision=bf16",))
    nf4 = trained(NAME, "alone")
    assert nf4.losses != bf16.losses
    assert nf4.losses[-1] == pytest.approx(bf16.losses[-1], rel=0.05)
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
        task(models / "spread").bind(TaskState())
    monkeypatch.setattr(importlib.metadata, "distributions", lambda name: [])
    with pytest.raises(UserError, match=r"^task.lora.base_dtype=nf4: not installed: bitsandbytes: .*\[nf4\]'$"):
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
    assert "belongs to a different base model (norm of frozen weights: " in str(other.messages)
