"""--check on language models and classifiers: correct runs pass, and documents that see others are found out."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.check.split_faults import FAULTS
from tests.check.test_check import assert_passes, rows
from tests.launching import QUIET, Launch, slow
from tests.text.tasks import TEXT, over
from tests.text.tiny import NEW_LLAMA, questions, write

pytestmark = pytest.mark.usefixtures("own_folder")
TASK = ("--task.name=causal_lm", "--task.sequence_length=64", "--global_batch_size=8")
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
def test_check_passes_text_tasks_in_bf16_with_frozen_weights(
    launch: Launch, shared: Path, name: str, yaml: str, more: Any
) -> None:
    task = replace(TEXT[name].ready(shared), launcher_arguments=("--mixed_precision=bf16",))
    assert_passes(task.run(launch, yaml, "--check", *more))


@pytest.mark.slow
def test_check_passes_the_chat_models_real_weights(launch: Launch, shared: Path) -> None:
    assert "all checks passed" in TEXT["chat"].ready(shared).run(launch, "fsdp", "--check").succeeded().stdout


@pytest.mark.parametrize("which", ["quick", slow("slow")])
def test_check_finds_each_fault_of_context_parallelism(launch: Launch, tmp_path: Path, which: str) -> None:
    output, data = tmp_path / "found.json", questions(tmp_path / "questions.jsonl", rows=24)
    arguments = (*TASK, f"--task.dataset={data}", *NEW_LLAMA, "--micro_batch_size=2", "--task.eval_from=last", *QUIET)
    words = (str(output), "tests.check.split_faults", which, *arguments)
    launch("fsdp_cp", *words, script="tests/check/examine.py", **over(1, 2)).succeeded()
    found = json.loads(output.read_text())
    for fault in [fault for fault in FAULTS if fault.yaml == which]:
        failed = {row["check"] for row in found[fault.name]}
        assert failed == ({fault.fails} if fault.fails else set()), (fault.name, found[fault.name])
        assert fault.measured in {row["what"] for row in found[fault.name]} or not failed, fault.name


CONTINUED_POSITIONS = """
import src.tasks.text.sequences as sequences
make = sequences.batch_tensors
def going_on(samples, width, padding):
    found, ends = make(samples, width, padding)
    found["position_ids"][:] = found["position_ids"].new_tensor(range(width))
    return found, ends
sequences.batch_tensors = going_on
"""
NO_TRIAL = "import src.tasks.text.causal_lm as causal_lm; causal_lm.require_decoder = lambda *_: None"


@pytest.mark.parametrize(
    ("yaml", "arguments", "before", "what", "means"),
    [
        ("ddp", NEW_LLAMA, CONTINUED_POSITIONS, "", "packed documents see each other"),
        # long documents make rotary embeddings other ones for a whole batch; a trial would refuse them
        ("cpu", (*LONGROPE, "--task.packing=false"), NO_TRIAL, "loss of examples alone", "depends on those beside it"),
    ],
    ids=["in a row", "in a batch"],
)
def test_check_finds_documents_that_change_those_beside_them(
    launch: Launch, tmp_path: Path, yaml: str, arguments: tuple[str, ...], before: str, what: str, means: str
) -> None:
    """One document in ten is short."""
    write({"rows.jsonl": [{"text": f"a row of {i} long words " * 3 if i % 10 else "short"} for i in range(60)]})
    run = launch(yaml, "--check", *TASK, f"--task.dataset={tmp_path}/rows.jsonl", *arguments, before=before)
    assert run.exit_code == 1
    (failed,) = [row for row in rows(run) if row["means"]]
    assert failed["check"] == "Evaluation"
    assert what in failed["what"]
    assert means in failed["means"]
