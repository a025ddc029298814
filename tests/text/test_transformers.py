"""Transformers as whole runs: packed, compiled and in half precision, and an export that others load."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from huggingface_hub import ModelCard
from peft import PeftModel
from safetensors.torch import load_file
from torch.nn import functional as F
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig, PreTrainedModel, pipeline

from src.tasks.text.model import end_tokens
from tests.launching import Run, slow
from tests.text.conftest import Trained
from tests.text.tasks import SMOLLM2

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
    """Experts are apart in files and together in the model: these are gathered, to be written. Adapters are exported
    alone, and on request merged."""
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
        assert end_tokens(GenerationConfig.from_pretrained(exported)) == [256]
        assert ModelCard.load(exported / "README.md").data.library_name == library
    assert run.summary["eval/perplexity"] == pytest.approx(math.exp(run.summary["eval/loss"]))
    card = (folder / "README.md").read_text()
    expected = {"library_name": library if len(exports) == 1 else "peft", "pipeline_tag": "text-generation"}
    assert expected.items() <= yaml.safe_load(card.split("---")[1]).items()
    assert f"| eval/loss | {run.summary['eval/loss']:.6g} |" in card


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing:FutureWarning")  # as in lora.py
def test_the_chat_models_real_weights_learn_and_are_exported(trained: Trained) -> None:
    """The logits of peft's model, of transformers' with the adapters, and of the merged model: some 1e-6 apart."""
    run = trained("chat")
    assert run.losses[-1] < run.losses[0] - 0.5
    folder, tokens = run.folder / "model", torch.arange(1000, 1020)[None]
    auto: Any = AutoModelForCausalLM
    sources = (SMOLLM2, folder, folder / "merged")
    base, adapted, merged = (auto.from_pretrained(source, dtype=torch.float32) for source in sources)
    with torch.no_grad():
        untrained, *others = (model(tokens).logits for model in (base, adapted, merged))
        first = PeftModel.from_pretrained(base, folder)(tokens).logits
    assert (untrained - first).abs().max() > 0.1
    for logits in others:
        assert (logits - first).abs().max() < 1e-4 * first.abs().max()


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
