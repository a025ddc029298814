"""What the tests of text share: tiny models and data, short runs on them, and a cache of each test's own."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import pytest
from filelock import FileLock

from tests.launching import Run, Whole
from tests.text import tiny

EARLY = (
    "--max_steps=12", "--log_every=1", "--optim.lr=1e-3", "--optim.schedule=constant", "--optim.warmup_steps=0",
    "--optim.max_grad_norm=1", "--global_batch_size=8", "--task.eval_from=last",
)  # fmt: skip
STRATEGY: tuple[str, ...] = ("--micro_batch_size=2",)
STRATEGY += ("--activation_checkpointing=true",)  # room: compile
MIXTRAL = ("--task.architecture.model_type=mixtral", "--task.architecture.num_local_experts=2")
FEW_LOGITS = "import src.tasks.text.language_model as m; m.CHUNK = 5000\n"
"""Of 19 tokens at a time, as if the vocabulary were large."""
Trained = Callable[..., Run]
"""Of the fixture `trained`."""


@pytest.fixture(scope="session")
def made(shared: Path) -> Path:
    """A folder of models and data which all of pytest's processes share. Leave them as they are."""
    folder = shared / "text"
    folder.mkdir(exist_ok=True)
    with FileLock(folder / "lock"):
        if not (folder / "models").exists():
            tiny.llama(folder / "models" / "llama")
            tiny.bert(folder / "models" / "bert")
            tiny.questions(folder / "questions.jsonl")
            tiny.reviews(folder / "reviews")
    return folder


@pytest.fixture(scope="session")
def models(made: Path) -> Path:
    """A folder with the models `llama` and `bert`."""
    return made / "models"


@pytest.fixture(scope="session")
def trained(whole: Whole, made: Path) -> Trained:
    """trained("lm", "fsdp"): a short run of this kind, with accumulation and clipping; the same for all who ask for it.

    Language models: packed, with masked prompts; `scratch` is one without pretrained weights. Of ragged lengths, so
    that the last batches are ragged too. Under a strategy there are micro-batches of two sequences, activations are
    recomputed and the losses of language models computed chunk by chunk.
    """
    lm = ("--task.name=causal_lm", f"--task.dataset={made}/questions.jsonl", "--task.sequence_length=128", *EARLY)
    classifier = ("--task.name=text_classification", f"--task.dataset={made}/reviews", *EARLY)
    llama, bert, adapters = f"--task.model={made}/models/llama", f"--task.model={made}/models/bert", "--task.lora.r=4"
    kinds = {
        "lm": (*lm, llama),
        "scratch": (*lm, *tiny.NEW_LLAMA),
        "experts": (*lm, *tiny.NEW_LLAMA, *MIXTRAL),
        "lm with adapters": (*lm, llama, adapters, "--task.lora.merge=true"),
        "classifier": (*classifier, bert),
        "classifier with adapters": (*classifier, bert, adapters),
    }

    def trained(kind: str, yaml: str = "cpu", *arguments: str, before: str = "", **more: Any) -> Run:
        how = ("--micro_batch_size=4",) if yaml == "cpu" else STRATEGY
        before = FEW_LOGITS * (yaml != "cpu") + before
        return whole(yaml, *kinds[kind], *how, *arguments, before=before, **more)

    return trained


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The environment is read when `datasets` is imported: too late for it here."""
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
