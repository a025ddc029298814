"""python -m src.tools.checkpoints export, of transformers."""

import shutil
from pathlib import Path

import pytest

from src.tools.checkpoints import main
from tests.launching import Launch
from tests.text import tiny

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")  # in this process, to read


@pytest.mark.parametrize(
    ("task", "lora"), [("causal_lm", ("--task.lora.r=4",)), ("text_classification", ())], ids=["adapters", "whole"]
)
def test_export_of_a_transformer(
    launch: Launch, models: Path, tmp_path: Path, task: str, lora: tuple[str, ...]
) -> None:
    """The same files as the run's, the same weights to the last bit; a classifier's labels are known without data."""
    questions, reviews = tiny.questions(tmp_path / "questions.jsonl"), tiny.reviews(tmp_path / "reviews")
    model, data = ("llama", questions) if task == "causal_lm" else ("bert", reviews)
    run = launch(
        "fsdp" if lora else "cpu", f"--task.name={task}", f"--task.model={models}/{model}", f"--task.dataset={data}",
        "--max_steps=3", "--global_batch_size=4", "--task.sequence_length=64", *lora,
    ).succeeded()  # fmt: skip
    data.rename(tmp_path / "away")
    copy = shutil.copytree(run.folder / "checkpoints" / "step_00000003", tmp_path / "elsewhere")
    assert not main(["export", str(copy), f"--output={tmp_path}/model"])
    there = {path.name for path in (run.folder / "model").iterdir()}
    assert {path.name for path in (tmp_path / "model").iterdir()} == there
    (file,) = (name for name in there if name.endswith(".safetensors"))
    assert (tmp_path / "model" / file).read_bytes() == (run.folder / "model" / file).read_bytes()
