"""--check on language models and classifiers: all is well where it is, and packed documents that meet are found out."""

from pathlib import Path

import pytest

from tests.check.test_check import assert_all_is_well, rows
from tests.launching import Launch
from tests.text import tiny


@pytest.mark.parametrize(("yaml", "lora"), [("ddp", False), ("fsdp", True)])
def test_a_language_model_with_ragged_counts_is_well(launch: Launch, tmp_path: Path, yaml: str, lora: bool) -> None:
    model = [f"--task.model={tiny.llama(tmp_path / 'llama')}", "--task.lora.r=4"] if lora else tiny.NEW_LLAMA
    data = tiny.questions(tmp_path / "questions.jsonl")
    run = launch(
        yaml, "--check", "--task.name=causal_lm", f"--task.dataset={data}", "--task.sequence_length=64", *model,
        "--global_batch_size=8", "--micro_batch_size=2", "--optim.max_grad_norm=1",
    )  # fmt: skip
    assert_all_is_well(run)


def test_a_classifier_is_well(launch: Launch, tmp_path: Path) -> None:
    arguments = (f"--task.model={tiny.bert(tmp_path / 'bert')}", f"--task.dataset={tiny.reviews(tmp_path / 'reviews')}")
    assert_all_is_well(launch("fsdp", "--check", "--task.name=text_classification", *arguments, "--task.dropout=0.1"))


def test_packed_documents_that_see_each_other_are_found_out(launch: Launch, tmp_path: Path) -> None:
    """Positions go on where packed documents meet."""
    data = tiny.questions(tmp_path / "questions.jsonl")
    before = """
import src.tasks.text.causal_lm as causal_lm
make = causal_lm.batch_tensors
def going_on(samples, width, padding):
    found, ends = make(samples, width, padding)
    found["position_ids"][:] = found["position_ids"].new_tensor(range(width))
    return found, ends
causal_lm.batch_tensors = going_on
"""
    task = ("--task.name=causal_lm", f"--task.dataset={data}", "--task.sequence_length=64", "--global_batch_size=8")
    run = launch("ddp", "--check", *task, *tiny.NEW_LLAMA, before=before)
    assert run.exit_code == 1
    (failed,) = [row for row in rows(run) if row["means"]]
    assert failed["check"] == "Evaluation"
    assert "packed documents see each other" in failed["means"]
