"""Transformers as whole runs: the same curve under every strategy, and an export that others load."""

import functools
import json
import math
from collections.abc import Callable
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

from tests.launching import Launch, Run, slow
from tests.text import tiny

EARLY = (
    "--max_steps=12", "--log_every=1", "--optim.lr=1e-4", "--optim.schedule=constant", "--optim.warmup_steps=0",
    "--optim.max_grad_norm=1", "--global_batch_size=8", "--task.eval_from=last",
)  # fmt: skip
CHECKPOINTED: tuple[str, ...] = ()
CHECKPOINTED += ("--activation_checkpointing=true",)  # room: compile
COMPILED = CHECKPOINTED
COMPILED += ("--compile=true",)  # room: compile
UNTRANSLATED = "import functools, torch\ntorch.compile = functools.partial(torch.compile, backend='aot_eager')"
"""As a compiler, but for the translation into C++, which takes a minute."""
FEW_LOGITS = "import src.tasks.text.language_model as m; m.CHUNK = 5000"
"""Of 19 tokens at a time, as if the vocabulary were large."""
LM_METRICS = ("eval/perplexity", "eval/accuracy")
METRICS = {
    "lm": LM_METRICS,
    "lm with adapters": LM_METRICS,
    "classifier": ("eval/accuracy", "eval/f1", "eval/matthews_correlation"),
    "classifier with adapters": ("eval/accuracy",),
}
Trained = Callable[..., Run]


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with `questions.jsonl` and, of ragged lengths so that the last batches are ragged too, `reviews`."""
    folder = tmp_path_factory.mktemp("data")
    tiny.questions(folder / "questions.jsonl")
    tiny.reviews(folder / "reviews")
    return folder


@pytest.fixture(scope="module")
def settings(data: Path, models: Path) -> dict[str, list[str]]:
    """Of each kind of run. Language models: packed, with masked prompts."""
    base = ["--task.name=causal_lm", f"--task.dataset={data}/questions.jsonl", "--task.sequence_length=128", *EARLY]
    lm = [*base, *tiny.NEW_LLAMA]
    classifier = ["--task.name=text_classification", f"--task.dataset={data}/reviews", *EARLY]
    classifier += [f"--task.model={models}/bert"]
    adapters = ["--task.lora.r=4", "--optim.lr=1e-3"]
    return {
        "lm": lm,
        "lm with adapters": [*base, f"--task.model={models}/llama", *adapters, "--task.lora.merge=true"],
        "classifier": classifier,
        "classifier with adapters": [*classifier, *adapters],
    }


@pytest.fixture(scope="module")
def trained(launch: Launch, settings: dict[str, list[str]]) -> Trained:
    """trained(kind, strategy, processes, arguments): the same run for all who ask for it. Several processes compute the
    losses of language models chunk by chunk."""

    @functools.cache
    def trained(kind: str, strategy: str = "cpu", processes: int = 1, arguments: tuple[str, ...] = ()) -> Run:
        micro = f"--micro_batch_size={4 if strategy == 'cpu' else 1}"
        quick = {"TORCHINDUCTOR_DEBUG_COMPILE": "1"}  # without optimizing what is compiled
        before = FEW_LOGITS if processes > 1 else ""
        run = launch(strategy, *settings[kind], micro, *arguments, processes=processes, before=before, **quick)
        return run.succeeded()

    return trained


@pytest.mark.parametrize(
    ("kind", "strategy", "processes", "arguments"),
    [
        ("lm", "ddp", 2, ()),
        ("lm", "fsdp", 2, ()),
        slow("lm", "hsdp", 4, CHECKPOINTED),
        slow("lm", "fsdp_grad_op", 2, COMPILED),
        slow("lm", "fsdp_offload", 2, ()),
        ("lm with adapters", "fsdp", 2, CHECKPOINTED),
        slow("lm with adapters", "ddp", 2, ()),
        slow("classifier", "ddp", 2, ()),
        ("classifier", "fsdp", 2, CHECKPOINTED),
        slow("classifier with adapters", "fsdp", 2, CHECKPOINTED),
    ],
)
def test_the_curve_is_the_same(
    trained: Trained, kind: str, strategy: str, processes: int, arguments: tuple[str, ...]
) -> None:
    """With accumulation and clipping. Tried with weights that are views of what a file holds: the
    offloaded ones cannot be saved."""
    run, alone = trained(kind, strategy, processes, arguments), trained(kind)
    assert run.summary["strategy"] == strategy
    assert len(run.losses) == len(alone.losses) == 12
    assert run.losses == pytest.approx(alone.losses, rel=1e-5)
    assert run.summary["eval/examples"] == alone.summary["eval/examples"]
    for name in ("eval/loss", *METRICS[kind]):
        assert run.summary[name] == pytest.approx(alone.summary[name], rel=1e-5)


def test_compiled_it_is_the_same_too(  # room: compile
    launch: Launch, settings: dict[str, list[str]], trained: Trained
) -> None:
    arguments = (*settings["lm"], "--micro_batch_size=1", "--max_steps=4", *COMPILED)
    run = launch("fsdp_grad_op", *arguments, before=UNTRANSLATED).succeeded()
    assert "compile" in run.stdout
    assert run.losses == pytest.approx(trained("lm").losses[:4], rel=1e-5)


# ------------------------------------------------------------------------------------------- causal language models
def test_packed_or_not_the_loss_of_the_same_documents_is_the_same(trained: Trained) -> None:
    """Each step takes all documents, so that both runs learn from the same ones."""
    arguments = ("--global_batch_size=200", "--micro_batch_size=10", "--max_steps=2")
    packed = trained("lm", "cpu", 1, arguments)
    apart = trained("lm", "fsdp", 2, (*arguments, "--task.packing=false"))
    assert packed.losses == pytest.approx(apart.losses, rel=1e-5)
    for name in ("eval/loss", *LM_METRICS):
        assert packed.summary[name] == pytest.approx(apart.summary[name], rel=1e-5)
    facts, facts_apart = packed.summary["data"]["train"], apart.summary["data"]["train"]
    assert facts["sequences"] < facts_apart["sequences"] / 2
    assert facts["tokens"] == facts_apart["tokens"]
    assert facts["padding"] < 0.05 < facts_apart["padding"]


def evaluated(model: PreTrainedModel, data: Path) -> float:
    """The loss on the completions of the evaluation rows, document by document, with nothing but transformers."""
    tokenizer = AutoTokenizer.from_pretrained(model.name_or_path)
    rows = [json.loads(line) for line in (data / "questions.jsonl").read_text().splitlines()]
    nats = count = 0.0
    for row in rows[-12:]:
        prompt, completion = (tokenizer(row[name], add_special_tokens=False)["input_ids"] for name in row)
        tokens = torch.tensor([[tokenizer.bos_token_id, *prompt, *completion, tokenizer.eos_token_id]])
        with torch.no_grad():
            losses = F.cross_entropy(model(tokens).logits[0, :-1], tokens[0, 1:], reduction="none")
        nats += losses[len(prompt) :].sum().item()
        count += len(completion) + 1
    return nats / count


def test_the_export_is_what_was_trained(trained: Trained, data: Path) -> None:
    run = trained("lm", "fsdp", 2)
    folder = run.folder / "model"
    assert {path.name for path in folder.iterdir()} == {
        "README.md", "chat_template.jinja", "config.json", "generation_config.json", "model.safetensors",
        "tokenizer.json", "tokenizer_config.json",
    }  # fmt: skip
    model = AutoModelForCausalLM.from_pretrained(folder)
    assert type(model).__name__ == "LlamaForCausalLM"
    assert evaluated(model, data) == pytest.approx(run.summary["eval/loss"], rel=1e-5)
    assert run.summary["eval/perplexity"] == pytest.approx(math.exp(run.summary["eval/loss"]))
    assert GenerationConfig.from_pretrained(folder).eos_token_id == 256
    card = (folder / "README.md").read_text()
    metadata = yaml.safe_load(card.split("---")[1])
    assert metadata == {"library_name": "transformers", "pipeline_tag": "text-generation", "tags": ["causal_lm"]}
    assert f"| eval/loss | {run.summary['eval/loss']:.6g} |" in card


def test_adapters_are_exported_alone_and_on_request_merged(trained: Trained, data: Path) -> None:
    run = trained("lm with adapters", "fsdp", 2, CHECKPOINTED)
    assert run.summary["trained_parameters"] < run.summary["parameters"] / 4
    folder = run.folder / "model"
    assert not (folder / "model.safetensors").exists()
    for exported in (folder, folder / "merged"):
        model = AutoModelForCausalLM.from_pretrained(exported)
        model.name_or_path = str(folder)
        assert evaluated(model, data) == pytest.approx(run.summary["eval/loss"], rel=1e-5)


# -------------------------------------------------------------------------------------------------------- precision
@pytest.mark.parametrize(("strategy", "processes"), [slow("cpu", 1), ("fsdp", 2)])
def test_in_fp16_steps_that_overflow_are_skipped_and_use_up_their_part_of_the_schedule(
    launch: Launch, settings: dict[str, list[str]], strategy: str, processes: int
) -> None:
    steep = (
        "--task.architecture.model_type=granite",
        "--task.architecture.logits_scaling=0.01",
        "--global_batch_size=64",
    )
    arguments = (*settings["lm"], *steep, "--optim.schedule=linear", "--optim.lr=1e-3")
    run = launch(strategy, *arguments, processes=processes, launcher_arguments=("--mixed_precision=fp16",)).succeeded()
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
def test_in_bf16_the_curve_stays_near_that_of_fp32(
    launch: Launch, settings: dict[str, list[str]], trained: Trained, strategy: str
) -> None:
    run = launch(strategy, *settings["lm"], processes=2, launcher_arguments=("--mixed_precision=bf16",)).succeeded()
    alone = trained("lm")
    assert run.summary["precision"] == "bf16"
    assert run.losses == pytest.approx(alone.losses, rel=2e-3)
    assert run.losses != pytest.approx(alone.losses, rel=1e-7)  # it is not fp32 under another name
    assert run.summary["eval/loss"] == pytest.approx(alone.summary["eval/loss"], rel=2e-3)
    weights = load_file(run.folder / "model" / "model.safetensors")
    assert {weight.dtype for weight in weights.values()} == {torch.float32}


def test_fp8_trains_and_exports_fp32_weights(launch: Launch, settings: dict[str, list[str]], models: Path) -> None:
    """Emulated on the CPU, on one process, whose weights keep torchao's wrapper; it can't be saved, which was tried."""
    arguments = [argument for argument in settings["lm"] if "architecture" not in argument]
    arguments += [f"--task.model={models}/llama", "--max_steps=3"]
    run = launch("fsdp_fp8", *arguments, processes=1, launcher_arguments=("--mixed_precision=fp8",)).succeeded()
    assert run.summary["precision"] == "fp8"
    before, after = (load_file(folder / "model.safetensors") for folder in (models / "llama", run.folder / "model"))
    for name, weight in after.items():
        assert weight.dtype == torch.float32
        assert 0 < (weight - before[name]).norm() < 0.1 * before[name].norm()


# ---------------------------------------------------------------------------------------------- text classification
@pytest.mark.parametrize("kind", ["classifier", slow("classifier with adapters")])
def test_an_exported_classifier_knows_its_labels(trained: Trained, data: Path, kind: str) -> None:
    """Where adapters were trained, they are merged into it."""
    run = trained(kind, "fsdp", 2, CHECKPOINTED)
    summary, folder = run.summary, run.folder / "model"
    model: Any = AutoModelForSequenceClassification.from_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert model.config.id2label == {0: "falling", 1: "rising"}
    rows = [line.split("\t") for line in (data / "reviews" / "dev.tsv").read_text().splitlines()[1:]]
    assert summary["eval/examples"] == len(rows) == 37
    losses = []
    for text, label in rows:
        with torch.no_grad():
            logits = model(**tokenizer(text, return_tensors="pt")).logits
        losses.append(F.cross_entropy(logits, torch.tensor([model.config.label2id[label]])).item())
    assert sum(losses) / len(rows) == pytest.approx(summary["eval/loss"], rel=1e-5)
