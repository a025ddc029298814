"""--check on language models and classifiers: all is well where it is, and documents that see others are found out."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.check.split_faults import FAULTS
from tests.check.test_check import assert_all_is_well, rows
from tests.launching import QUIET, Launch, slow
from tests.text.tasks import TEXT, over
from tests.text.tiny import NEW_LLAMA, questions

pytestmark = pytest.mark.usefixtures("own_folder")
TASK = ("--task.name=causal_lm", "--task.sequence_length=64")
FACTORS = "{rope_type: longrope, rope_theta: 1e4, short_factor: [1, 1, 1, 1], long_factor: [1.1, 4, 20, 60]}"
LONGROPE = (
    "--task.architecture.model_type=phi3", *NEW_LLAMA[1:], f"--task.architecture.rope_parameters={FACTORS}",
    "--task.architecture.original_max_position_embeddings=32", "--task.architecture.max_position_embeddings=64",
)  # fmt: skip


@pytest.mark.parametrize(
    ("name", "yaml", "more"),
    [
        ("lm with adapters", "fsdp", ("--task.lora.base_dtype=bf16",)),
        ("lm in 4 bits", "ddp", ()),
        ("classifier", "ddp", ("--task.dropout=0.1",)),
    ],
)
def test_a_task_with_ragged_counts_is_well(launch: Launch, shared: Path, name: str, yaml: str, more: Any) -> None:
    """In bf16, with frozen weights in bf16 or in 4 bits. Tried with frozen weights that compute in bf16: gradients are
    off. One with shared sequences: the next test but one. A language model under DDP, but for a fault: the last one."""
    task = replace(TEXT[name].ready(shared), launcher_arguments=("--mixed_precision=bf16",))
    assert_all_is_well(task.run(launch, yaml, "--check", *more))


@pytest.mark.slow
def test_the_chat_models_real_weights_are_well(launch: Launch, shared: Path) -> None:
    assert "all checks passed" in TEXT["chat"].ready(shared).run(launch, "fsdp", "--check").succeeded().stdout


@pytest.mark.parametrize("which", ["quick", slow("slow")])
def test_each_fault_of_shared_sequences_is_found_by_its_check(launch: Launch, tmp_path: Path, which: str) -> None:
    """On two processes."""
    output, data = tmp_path / "found.json", questions(tmp_path / "questions.jsonl", rows=24)
    task = (*TASK, f"--task.dataset={data}", *NEW_LLAMA)
    arguments = (*task, "--global_batch_size=8", "--micro_batch_size=2", "--task.eval_from=last", *QUIET)
    words = (str(output), "tests.check.split_faults", which, *arguments)
    launch("fsdp_cp", *words, script="tests/check/examine.py", **over(1, 2)).succeeded()
    found = json.loads(output.read_text())
    for fault in [fault for fault in FAULTS if fault.yaml == which]:
        failed = {row["check"]: row["what"] for row in found[fault.name]}
        assert [*failed] == ([fault.fails] if fault.fails else []), (fault.name, found[fault.name])
        assert fault.measured in {row["what"] for row in found[fault.name]} or not failed, (
            fault.name,
            found[fault.name],
        )


def test_packed_documents_that_see_each_other_are_found_out(launch: Launch, made: Path) -> None:
    """Positions go on where packed documents meet."""
    before = """
import src.tasks.text.sequences as sequences
make = sequences.batch_tensors
def going_on(samples, width, padding):
    found, ends = make(samples, width, padding)
    found["position_ids"][:] = found["position_ids"].new_tensor(range(width))
    return found, ends
sequences.batch_tensors = going_on
"""
    data = f"--task.dataset={made}/questions.jsonl"
    run = launch("ddp", "--check", *TASK, data, *NEW_LLAMA, "--global_batch_size=8", before=before)
    assert run.exit_code == 1
    (failed,) = [row for row in rows(run) if row["means"]]
    assert failed["check"] == "Evaluation"
    assert "packed documents see each other" in failed["means"]


def test_documents_that_change_how_those_beside_them_are_read_are_found_out(launch: Launch, tmp_path: Path) -> None:
    """One row in ten is short; the others make rotary embeddings other ones for a whole batch, of any size. A trial
    refuses them otherwise. Tried without comparing unpacked examples with the same ones alone: all checks passed."""
    lines = [json.dumps({"text": "short" if row % 10 == 0 else f"a row of {row} long words " * 3}) for row in range(60)]
    (tmp_path / "rows.jsonl").write_text("\n".join(lines))
    before = "import src.tasks.text.sequences as sequences; causal_lm.require_decoder = lambda *_: None"
    arguments = (f"--task.dataset={tmp_path}/rows.jsonl", *LONGROPE, "--task.packing=false", "--global_batch_size=8")
    run = launch("cpu", "--check", *TASK, *arguments, before=before)
    assert run.exit_code == 1
    (failed,) = [row for row in rows(run) if row["means"]]
    assert (failed["check"], failed["what"]) == ("Evaluation", "loss of examples alone")
    assert "depends on those beside it" in failed["means"]
