"""Transformers through the launcher: the same curve under every strategy, and an export that others load."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file
from torch.nn import functional as F
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    GenerationConfig,
    PreTrainedModel,
)

from tests.launching import Launch, Run
from tests.text import tiny

EARLY = (
    "--max_steps=12", "--log_every=1", "--optim.lr=1e-4", "--optim.schedule=constant", "--optim.warmup_steps=0",
    "--optim.max_grad_norm=1", "--global_batch_size=8",
)  # fmt: skip
STRATEGIES = [
    ("ddp", 2, ()),
    ("ddp", 4, ("--activation_checkpointing=true",)),
    ("fsdp", 2, ()),
    ("fsdp", 4, ("--activation_checkpointing=true",)),
    ("fsdp_grad_op", 2, ("--compile=true", "--activation_checkpointing=true")),
    ("fsdp_offload", 2, ()),
]


def assert_same_curve(run: Run, alone: Run, metrics: tuple[str, ...]) -> None:
    assert len(run.losses) == len(alone.losses) == 12
    assert run.losses == pytest.approx(alone.losses, rel=1e-5)
    assert run.summary["eval/examples"] == alone.summary["eval/examples"]
    for name in ("eval/loss", *metrics):
        assert run.summary[name] == pytest.approx(alone.summary[name], rel=1e-5)


# ------------------------------------------------------------------------------------------- causal language models
@pytest.fixture(scope="module")
def questions(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.questions(tmp_path_factory.mktemp("data") / "questions.jsonl")


def causal_lm(questions: Path, *arguments: str) -> list[str]:
    architecture = [f"--task.architecture.{name}={value}" for name, value in tiny.LLAMA.items()]
    return [
        "--task.name=causal_lm", f"--task.dataset={questions}", "--task.sequence_length=128",
        "--task.architecture.model_type=llama", *architecture, *EARLY, *arguments,
    ]  # fmt: skip


@pytest.fixture(scope="module")
def lm_alone(launch: Launch, questions: Path) -> Run:
    prompts = "--task.sample_prompts=['Q: the', '']"
    return launch("cpu", *causal_lm(questions, "--micro_batch_size=4", prompts)).succeeded()


LM_METRICS = ("eval/perplexity", "eval/bits_per_byte", "eval/accuracy")


@pytest.mark.parametrize(("strategy", "processes", "arguments"), STRATEGIES)
def test_a_language_model_has_the_same_curve(
    launch: Launch, questions: Path, lm_alone: Run, strategy: str, processes: int, arguments: tuple[str, ...]
) -> None:
    """Packed, with masked prompts, accumulation, clipping and samples in between."""
    settings = causal_lm(questions, "--micro_batch_size=1", "--task.sample_prompts=['Q: the', '']", *arguments)
    run = launch(strategy, *settings, processes=processes).succeeded()
    assert run.summary["strategy"] == strategy
    assert_same_curve(run, lm_alone, LM_METRICS)
    assert samples(run) == samples(lm_alone)


def samples(run: Run) -> list[list[dict[str, str]]]:
    return [record["eval/samples"] for record in run.records if "eval/samples" in record]


def test_samples_of_each_evaluation_are_in_the_record(lm_alone: Run) -> None:
    assert len(samples(lm_alone)) == len([record for record in lm_alone.records if "eval/loss" in record]) > 1
    for rows in samples(lm_alone):
        assert [row["prompt"] for row in rows] == ["Q: the", ""]
        assert all(len(row["continuation"]) > 1 for row in rows)


def test_packed_or_not_the_loss_of_the_same_documents_is_the_same(launch: Launch, questions: Path) -> None:
    """Each step takes all documents, so that both runs learn from the same ones."""
    arguments = ("--global_batch_size=200", "--micro_batch_size=10", "--max_steps=3")
    packed = launch("cpu", *causal_lm(questions, *arguments)).succeeded()
    apart = launch("fsdp", *causal_lm(questions, *arguments, "--task.packing=false"), processes=2).succeeded()
    assert packed.losses == pytest.approx(apart.losses, rel=1e-5)
    for name in ("eval/loss", *LM_METRICS):
        assert packed.summary[name] == pytest.approx(apart.summary[name], rel=1e-5)
    assert packed.summary["data"]["train"]["sequences"] < apart.summary["data"]["train"]["sequences"] / 2
    assert packed.summary["data"]["train"]["tokens"] == apart.summary["data"]["train"]["tokens"]
    assert packed.summary["data"]["train"]["padding"] < 0.05 < apart.summary["data"]["train"]["padding"]


def evaluated(model: PreTrainedModel, questions: Path) -> float:
    """The loss on the completions of the evaluation rows, document by document, with nothing but transformers."""
    tokenizer = AutoTokenizer.from_pretrained(model.name_or_path)
    rows = [json.loads(line) for line in questions.read_text().splitlines()]
    nats = count = 0.0
    for row in rows[-12:]:
        prompt, completion = (tokenizer(row[name], add_special_tokens=False)["input_ids"] for name in row)
        tokens = torch.tensor([[tokenizer.bos_token_id, *prompt, *completion, tokenizer.eos_token_id]])
        with torch.no_grad():
            losses = F.cross_entropy(model(tokens).logits[0, :-1], tokens[0, 1:], reduction="none")
        nats += losses[len(prompt) :].sum().item()
        count += len(completion) + 1
    return nats / count


def test_the_export_is_what_was_trained(launch: Launch, questions: Path) -> None:
    arguments = causal_lm(questions, "--optim.lr=3e-3", "--task.eval_from=last", "--max_steps=30")
    run = launch("fsdp", *arguments, processes=2).succeeded()
    folder = run.folder / "model"
    assert {path.name for path in folder.iterdir()} == {
        "README.md", "chat_template.jinja", "config.json", "generation_config.json", "model.safetensors",
        "tokenizer.json", "tokenizer_config.json",
    }  # fmt: skip
    model = AutoModelForCausalLM.from_pretrained(folder)
    assert type(model).__name__ == "LlamaForCausalLM"
    assert evaluated(model, questions) == pytest.approx(run.summary["eval/loss"], rel=1e-5)
    assert run.summary["eval/loss"] < 4
    assert run.summary["eval/perplexity"] == pytest.approx(math.exp(run.summary["eval/loss"]))
    assert GenerationConfig.from_pretrained(folder).eos_token_id == 256
    card = (folder / "README.md").read_text()
    metadata = yaml.safe_load(card.split("---")[1])
    assert metadata == {"library_name": "transformers", "pipeline_tag": "text-generation", "tags": ["causal_lm"]}
    assert f"| eval/loss | {run.summary['eval/loss']:.6g} |" in card
    assert str(questions) in card


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.llama(tmp_path_factory.mktemp("models") / "llama")


def lora(questions: Path, llama: Path) -> list[str]:
    arguments = [a for a in causal_lm(questions) if "architecture" not in a]
    return [
        *arguments, f"--task.model={llama}", "--task.lora.r=4", "--task.lora.merge=true", "--task.eval_from=last",
        "--optim.lr=1e-3",
    ]  # fmt: skip


@pytest.fixture(scope="module")
def lora_alone(launch: Launch, questions: Path, llama: Path) -> Run:
    return launch("cpu", *lora(questions, llama)).succeeded()


@pytest.mark.parametrize(
    ("strategy", "arguments"), [("ddp", ()), ("fsdp", ("--activation_checkpointing=true",)), ("fsdp_offload", ())]
)
def test_adapters_have_the_same_curve(
    launch: Launch, questions: Path, llama: Path, lora_alone: Run, strategy: str, arguments: tuple[str, ...]
) -> None:
    run = launch(strategy, *lora(questions, llama), *arguments, processes=2).succeeded()
    assert_same_curve(run, lora_alone, LM_METRICS)
    assert run.summary["trained_parameters"] < run.summary["parameters"] / 4


def test_adapters_are_exported_alone_and_on_request_merged(lora_alone: Run, questions: Path) -> None:
    folder = lora_alone.folder / "model"
    assert {"adapter_config.json", "adapter_model.safetensors"} <= {path.name for path in folder.iterdir()}
    assert not (folder / "model.safetensors").exists()
    for model in (
        AutoModelForCausalLM.from_pretrained(folder),
        AutoModelForCausalLM.from_pretrained(folder / "merged"),
    ):
        model.name_or_path = str(folder)
        assert evaluated(model, questions) == pytest.approx(lora_alone.summary["eval/loss"], rel=1e-5)


@pytest.mark.parametrize(("strategy", "processes"), [("cpu", 1), ("fsdp", 2), ("fsdp_offload", 2)])
def test_in_fp16_steps_that_overflow_are_skipped_and_do_not_advance_the_schedule(
    launch: Launch, questions: Path, strategy: str, processes: int
) -> None:
    arguments = causal_lm(questions, "--optim.schedule=linear", "--optim.lr=1e-3", "--global_batch_size=64")
    run = launch(strategy, *arguments, processes=processes, launcher_arguments=("--mixed_precision=fp16",)).succeeded()
    assert run.summary["precision"] == "fp16"
    training = [record for record in run.records if "train/loss" in record]
    skipped = run.summary["skipped_steps"]
    assert 0 < skipped < 8
    assert training[-1]["train/loss_scale"] == 2.0 ** (16 - skipped)
    rates = [record["train/lr"] for record in training]
    assert rates[: skipped + 1] == [1e-3] * (skipped + 1)
    assert rates[skipped + 1 :] == pytest.approx([1e-3 * (1 - i / 12) for i in range(1, 12 - skipped)])
    assert run.losses[skipped] == pytest.approx(run.losses[0], rel=0.02)  # nothing was learnt meanwhile
    assert run.losses[-1] < run.losses[0]


@pytest.mark.parametrize(("strategy", "processes"), [("cpu", 1), ("ddp", 2), ("fsdp", 2), ("fsdp_offload", 2)])
def test_in_bf16_the_curve_stays_near_that_of_fp32(
    launch: Launch, questions: Path, lm_alone: Run, strategy: str, processes: int
) -> None:
    run = launch(
        strategy, *causal_lm(questions), processes=processes, launcher_arguments=("--mixed_precision=bf16",)
    ).succeeded()
    assert run.summary["precision"] == "bf16"
    assert run.losses == pytest.approx(lm_alone.losses, rel=2e-3)
    assert run.losses != pytest.approx(lm_alone.losses, rel=1e-7)  # it is not fp32 under another name
    assert run.summary["eval/loss"] == pytest.approx(lm_alone.summary["eval/loss"], rel=2e-3)
    assert {weight.dtype for weight in load_file(run.folder / "model" / "model.safetensors").values()} == {
        torch.float32
    }


def test_fp8_trains_and_exports_fp32_weights(launch: Launch, tmp_path: Path) -> None:
    """Emulated on the CPU, on one process, whose weights keep torchao's wrapper; it can't be saved, which was tried."""
    data = tiny.questions(tmp_path / "questions.jsonl")
    run = launch(
        "fsdp_fp8", "--task.name=causal_lm", f"--task.dataset={data}", "--task.sequence_length=64",
        f"--task.model={tiny.llama(tmp_path / 'llama')}", "--global_batch_size=8", "--max_steps=3", "--log_every=1",
        processes=1, launcher_arguments=("--mixed_precision=fp8",),
    ).succeeded()  # fmt: skip
    assert run.summary["precision"] == "fp8"
    before, after = (load_file(folder / "model.safetensors") for folder in (tmp_path / "llama", run.folder / "model"))
    for name, weight in after.items():
        assert weight.dtype == torch.float32
        assert 0 < (weight - before[name]).norm() < 0.1 * before[name].norm()


# ---------------------------------------------------------------------------------------------- text classification
@pytest.fixture(scope="module")
def classification(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    folder = tmp_path_factory.mktemp("classification")
    return [
        "--task.name=text_classification", f"--task.model={tiny.bert(folder / 'bert')}",
        f"--task.dataset={tiny.reviews(folder / 'reviews')}", *EARLY,
    ]  # fmt: skip


@pytest.fixture(scope="module")
def classifier_alone(launch: Launch, classification: list[str]) -> Run:
    return launch("cpu", *classification, "--micro_batch_size=4").succeeded()


@pytest.mark.parametrize(("strategy", "processes", "arguments"), STRATEGIES)
def test_a_classifier_has_the_same_curve(
    launch: Launch,
    classification: list[str],
    classifier_alone: Run,
    strategy: str,
    processes: int,
    arguments: tuple[str, ...],
) -> None:
    """110 and 37 texts of ragged lengths, so that the last batches are ragged too."""
    run = launch(strategy, *classification, "--micro_batch_size=1", *arguments, processes=processes).succeeded()
    assert_same_curve(run, classifier_alone, ("eval/accuracy", "eval/f1", "eval/matthews_correlation"))
    assert run.summary["eval/examples"] == 37


@pytest.fixture(scope="module")
def adapted_classifier(launch: Launch, classification: list[str]) -> Run:
    return launch("fsdp", *classification, "--task.lora.r=4", "--optim.lr=1e-3", processes=2).succeeded()


def test_a_classifier_with_adapters_has_the_same_curve(
    launch: Launch, classification: list[str], adapted_classifier: Run
) -> None:
    alone = launch("cpu", *classification, "--task.lora.r=4", "--optim.lr=1e-3").succeeded()
    assert_same_curve(adapted_classifier, alone, ("eval/accuracy",))
    assert alone.summary["trained_parameters"] < alone.summary["parameters"] / 4


@pytest.mark.parametrize("name", ["classifier_alone", "adapted_classifier"])
def test_an_exported_classifier_knows_its_labels(
    name: str, classification: list[str], request: pytest.FixtureRequest
) -> None:
    """Where adapters were trained, they are merged into it."""
    run: Run = request.getfixturevalue(name)
    folder = run.folder / "model"
    model: Any = AutoModelForSequenceClassification.from_pretrained(folder)
    assert type(model).__name__ == "BertForSequenceClassification"
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert model.config.id2label == {0: "falling", 1: "rising"}
    dataset = Path(next(a for a in classification if "dataset" in a).partition("=")[2])
    rows = [line.split("\t") for line in (dataset / "dev.tsv").read_text().splitlines()[1:]]
    losses, hits = [], 0
    for text, label in rows:
        with torch.no_grad():
            logits = model(**tokenizer(text, return_tensors="pt")).logits
        target = torch.tensor([model.config.label2id[label]])
        losses.append(F.cross_entropy(logits, target).item())
        hits += int(logits.argmax() == target)
    assert sum(losses) / len(rows) == pytest.approx(run.summary["eval/loss"], rel=1e-5)
    assert hits / len(rows) == pytest.approx(run.summary["eval/accuracy"])
