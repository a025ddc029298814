"""Transformers as whole runs: packed, compiled and in half precision, and an export that others load."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from huggingface_hub import ModelCard
from safetensors.torch import load_file
from torch.nn import functional as F
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    PreTrainedModel,
    pipeline,
)

from src.tasks.text.model import end_tokens
from tests.launching import slow
from tests.text.conftest import Trained

UNTRANSLATED = "import functools, torch\ntorch.compile = functools.partial(torch.compile, backend='aot_eager')"
"""As a compiler, but for the translation into C++, which takes a minute."""


@pytest.mark.parametrize("before", [UNTRANSLATED, slow("")])
def test_compiled_it_is_the_same_too(trained: Trained, before: str) -> None:
    unoptimized = {"TORCHINDUCTOR_DEBUG_COMPILE": "1"}
    run = trained("lm", "fsdp_grad_op", "--compile=true", "--max_steps=4", before=before, **unoptimized)
    assert "compile" in run.stdout
    assert run.losses == pytest.approx(trained("lm").losses[:4], rel=1e-5)


# ------------------------------------------------------------------------------------------- causal language models
def test_packed_or_not_the_loss_of_the_same_documents_is_the_same(trained: Trained) -> None:
    """Each step takes all documents, so that both runs learn from the same ones. From scratch, each process builds the
    whole model first, which is said."""
    steps = ("--global_batch_size=200", "--micro_batch_size=10", "--max_steps=2")
    packed, apart = trained("scratch", "alone", *steps), trained("scratch", "fsdp", *steps, "--task.packing=false")
    assert packed.losses == pytest.approx(apart.losses, rel=1e-5)
    for name in ("eval/loss", "eval/accuracy"):
        assert packed.summary[name] == pytest.approx(apart.summary[name], rel=1e-5)
    sequences, more = (run.summary["data"]["train"]["sequences"] for run in (packed, apart))
    assert sequences < more / 2
    assert apart.summary["built_whole"]
    assert "each process built the whole model first" in apart.stdout


def evaluated(model: PreTrainedModel, made: Path) -> float:
    """The loss on the completions of the evaluation rows, document by document, with nothing but transformers."""
    tokenizer = AutoTokenizer.from_pretrained(model.name_or_path)
    rows = [json.loads(line) for line in (made / "questions.jsonl").read_text().splitlines()]
    losses = []
    for row in rows[-12:]:
        prompt, completion = (tokenizer(row[name], add_special_tokens=False)["input_ids"] for name in row)
        tokens = torch.tensor([tokenizer.bos_token_id, *prompt, *completion, tokenizer.eos_token_id])
        with torch.no_grad():
            logits = model(tokens[None]).logits[0, len(prompt) : -1]
        losses.append(F.cross_entropy(logits, tokens[len(prompt) + 1 :], reduction="none"))
    return torch.cat(losses).mean().item()


@pytest.mark.parametrize("kind", ["lm", "experts"])
def test_the_export_is_what_was_trained(trained: Trained, made: Path, kind: str) -> None:
    """Experts are apart in files and together in the model: these are gathered, to be written."""
    run = trained(kind, "fsdp")
    folder = run.folder / "model"
    assert {path.name for path in folder.iterdir()} == {
        "README.md", "chat_template.jinja", "config.json", "generation_config.json", "model.safetensors",
        "tokenizer.json", "tokenizer_config.json",
    }  # fmt: skip
    model = AutoModelForCausalLM.from_pretrained(folder)
    assert evaluated(model, made) == pytest.approx(run.summary["eval/loss"], rel=1e-5)
    assert run.summary["eval/perplexity"] == pytest.approx(math.exp(run.summary["eval/loss"]))
    assert end_tokens(GenerationConfig.from_pretrained(folder)) == [256]
    card = (folder / "README.md").read_text()
    metadata = yaml.safe_load(card.split("---")[1])
    assert metadata == {"library_name": "transformers", "pipeline_tag": "text-generation", "tags": ["causal_lm"]}
    assert f"| eval/loss | {run.summary['eval/loss']:.6g} |" in card


def test_adapters_are_exported_alone_and_on_request_merged(trained: Trained, made: Path) -> None:
    run = trained("lm with adapters", "fsdp")
    assert run.summary["trained_parameters"] < run.summary["parameters"] / 4
    folder = run.folder / "model"
    assert not (folder / "model.safetensors").exists()
    for exported in (folder, folder / "merged"):
        model = AutoModelForCausalLM.from_pretrained(exported)
        model.name_or_path = str(folder)
        library = "peft" if exported == folder else "transformers"
        assert ModelCard.load(exported / "README.md").data.library_name == library
        assert evaluated(model, made) == pytest.approx(run.summary["eval/loss"], rel=1e-5)


# -------------------------------------------------------------------------------------------------------- precision
@pytest.mark.parametrize("strategy", [slow("cpu"), "fsdp"])
def test_in_fp16_steps_that_overflow_are_skipped_and_use_up_their_part_of_the_schedule(
    trained: Trained, strategy: str
) -> None:
    steep = ("--task.architecture.model_type=granite", "--task.architecture.logits_scaling=0.01")
    arguments = (*steep, "--global_batch_size=64", "--micro_batch_size=32", "--optim.schedule=linear")
    run = trained("scratch", strategy, *arguments, launcher_arguments=("--mixed_precision=fp16",))
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
    half = {"launcher_arguments": ("--mixed_precision=bf16",)}
    run, alone = trained("lm", strategy, "--micro_batch_size=4", **half), trained("lm")
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


# ---------------------------------------------------------------------------------------------- text classification
@pytest.mark.parametrize("kind", [slow("classifier"), "classifier with adapters"])
def test_an_exported_classifier_knows_its_labels(trained: Trained, made: Path, kind: str) -> None:
    """Where adapters were trained, they are merged into it."""
    run = trained(kind, "fsdp")
    folder = run.folder / "model"
    classify: Any = pipeline("text-classification", str(folder), top_k=None)
    rows = [line.split("\t") for line in (made / "reviews" / "dev.tsv").read_text().splitlines()[1:]]
    assert run.summary["eval/examples"] == len(rows) == 37
    losses = []
    for text, label in rows:
        (found,) = classify([text])
        losses += [-math.log(share["score"]) for share in found if share["label"] == label]
    assert sum(losses) / len(rows) == pytest.approx(run.summary["eval/loss"], rel=1e-5)
