"""Checkpoints of transformers: a killed run goes on exactly, adapters alone are saved, other data are refused."""

import os
import re
import shutil
from pathlib import Path
from typing import Any

import pytest

from src.checkpoint.same_run import changed_settings, require_same_data  # room: safeguards
from src.config.config import config_from
from src.tasks import TASKS
from src.tasks.text.text_classification import TextClassification
from tests.faults.runs import SHORT, assert_same_run, curve, cut_back, killed_and_resumed
from tests.launching import Launch, Whole, slow
from tests.text import tiny


@pytest.mark.parametrize("yaml", [slow("cpu"), slow("ddp"), "fsdp"])
def test_a_killed_transformer_goes_on_to_the_last_bit(
    launch: Launch, whole: Whole, made: Path, tmp_path: Path, yaml: str
) -> None:
    """With dropout, accumulation and packing, into the second epoch. Tried without: restoring the random numbers
    (dropout), the optimizer, what was summed up since the last record; cutting the order of the epoch and the record
    off where the checkpoint was made."""
    arguments = (
        "--task.name=causal_lm", f"--task.model={made}/models/llama", f"--task.dataset={made}/questions.jsonl",
        "--task.sequence_length=64", "--task.dropout=0.1", "--global_batch_size=8", "--micro_batch_size=2",
        *SHORT, "--max_steps=16", "--log_every=3",
    )  # fmt: skip
    run = killed_and_resumed(launch, yaml, arguments, tmp_path / "run")
    assert_same_run(run, whole(yaml, *arguments))


def test_adapters_are_saved_without_the_model_that_they_adapt(launch: Launch, made: Path, tmp_path: Path) -> None:
    """And go on to the last bit, but only beside the weights that they were trained with. Tried with saving
    frozen weights too: it is as large as the model; without comparing their norm: it trains on beside others."""
    model = tiny.llama(tmp_path / "llama")
    arguments = (
        "--task.name=causal_lm", f"--task.model={model}", f"--task.dataset={made}/questions.jsonl", "--task.lora.r=4",
        "--task.sequence_length=64", "--global_batch_size=4", "--max_steps=6", "--save_every=4", "--log_every=1",
    )  # fmt: skip
    whole = launch("fsdp", *arguments).succeeded()
    shards = (whole.folder / "checkpoints" / "step_00000006").glob("shard-*")
    assert sum(shard.stat().st_size for shard in shards) < os.path.getsize(model / "model.safetensors")
    run = launch("fsdp", *arguments, folder=cut_back(whole, tmp_path / "run", 4)).succeeded()
    assert curve(run) == curve(whole)
    tiny.llama(tmp_path / "other", seed=1)
    shutil.copy(tmp_path / "other" / "model.safetensors", model)
    other = launch("cpu", *arguments, "--max_steps=8", folder=tmp_path / "run")
    assert "was trained with other frozen weights" in other.messages[0]


SWAPPED = {"falling": "rising", "rising": "falling"}  # room: safeguards


@pytest.mark.parametrize(
    ("name", "edit", "says"),
    [
        ("*.tsv", lambda text: text.replace("falling", "low"), '["falling", "rising"] -> ["low", "rising"]'),
        ("train.tsv", lambda text: re.sub("falling|rising", lambda m: SWAPPED[m[0]], text), "labels to train on"),
        ("dev.tsv", lambda text: text.replace("the", "teh"), "other text, images or labels to evaluate on"),
        ("train.tsv", lambda text: "\n".join([*text.split("\n")[:1], *text.split("\n")[:0:-1]]), "other text, images"),
    ],
)
def test_other_data_are_another_run(  # room: safeguards
    models: Path, tmp_path: Path, name: str, edit: Any, says: str
) -> None:
    """Labels that are renamed or swapped, texts that are edited or moved, as long as before: each is named. Tried with
    comparing the number of examples."""

    def facts(reviews: Path) -> dict[str, Any]:
        task = TextClassification(model=f"{models}/bert", dataset=str(reviews))
        data = task.build_datasets()
        return {"examples": 110, "data_state": task.data_state(), "data": [task.fingerprint(part) for part in data]}

    then = facts(tiny.reviews(tmp_path / "reviews"))
    reviews = (tmp_path / "reviews").rename(tmp_path / "moved")
    require_same_data(Path("step"), then, facts(reviews))
    for file in reviews.glob(name):
        file.write_text(edit(file.read_text()))
    with pytest.raises(ValueError, match=re.escape(says)):
        require_same_data(Path("step"), then, facts(reviews))


def test_a_change_within_a_mapping_is_a_change() -> None:  # room: safeguards
    """Tried with comparing only what is no mapping."""
    task = {"name": "causal_lm", "architecture": {"model_type": "llama"}}
    now = config_from({"task": task, "output_dir": "run"}, TASKS)
    then = now.model_dump(mode="json")
    assert changed_settings(now, then) == {}
    then["task"]["architecture"]["hidden_act"] = "relu"
    assert list(changed_settings(now, then)) == ["task.architecture"]
