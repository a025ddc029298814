"""Checkpoints of transformers: adapters alone are saved, other data are refused."""

import dataclasses
import os
import re
from pathlib import Path
from typing import Any

import pytest

from src.checkpoint.compatibility import changed_settings, require_same_data
from src.config.config import config_from
from src.tasks import TASKS
from src.tasks.text.text_classification import TextClassification
from src.training.state import Origin
from tests.faults.runs import ORIGIN, cut_back
from tests.launching import Launch
from tests.text import tiny
from tests.text.conftest import Trained
from tests.text.tasks import TEXT


def test_adapters_are_saved_without_the_model_that_they_adapt(
    launch: Launch, trained: Trained, shared: Path, models: Path, tmp_path: Path
) -> None:
    """And go on only beside the weights that they were trained with. Tried with saving frozen weights too: it is as
    large as the model; without comparing their norm: it trains on beside others."""
    folder = cut_back(trained("lm with adapters", "fsdp"), tmp_path / "run", 8)
    shards = (folder / "checkpoints" / "step_00000008").glob("shard-*")
    assert sum(shard.stat().st_size for shard in shards) < os.path.getsize(models / "llama" / "model.safetensors")
    others = (f"--task.model={tiny.llama(tmp_path / 'other', seed=1)}", "--checkpoint.accept_changes=true")
    other = TEXT["lm with adapters"].ready(shared).run(launch, "fsdp", *others, folder=folder)
    assert "was trained with other frozen weights" in str(other.messages)


SWAPPED = {"falling": "rising", "rising": "falling"}


@pytest.mark.parametrize(
    ("name", "edit", "says"),
    [
        ("*.tsv", lambda text: text.replace("falling", "low"), '["falling", "rising"] -> ["low", "rising"]'),
        ("train.tsv", lambda text: re.sub("falling|rising", lambda m: SWAPPED[m[0]], text), "labels to train on"),
        ("dev.tsv", lambda text: text.replace("the", "teh"), "other text, images or labels to evaluate on"),
        ("train.tsv", lambda text: "\n".join([*text.split("\n")[:1], *text.split("\n")[:0:-1]]), "other text, images"),
    ],
)
def test_other_data_are_another_run(models: Path, tmp_path: Path, name: str, edit: Any, says: str) -> None:
    """Labels that are renamed or swapped, texts that are edited or moved, as long as before: each is named. Tried with
    comparing the number of examples."""

    def origin(reviews: Path) -> Origin:
        task = tiny.task(TextClassification, model=f"{models}/bert", dataset=str(reviews))
        data = task.build_datasets()
        fingerprints = [task.fingerprint(part) for part in data]
        return dataclasses.replace(ORIGIN, data_state=task.state.data, fingerprints=fingerprints)

    then = origin(tiny.reviews(tmp_path / "reviews"))
    reviews = (tmp_path / "reviews").rename(tmp_path / "moved")
    require_same_data(Path("step"), then, origin(reviews))
    for file in reviews.glob(name):
        file.write_text(edit(file.read_text()))
    with pytest.raises(ValueError, match=re.escape(says)):
        require_same_data(Path("step"), then, origin(reviews))


def test_a_change_within_a_mapping_is_a_change() -> None:
    """Tried with comparing only what is no mapping."""
    task = {"name": "causal_lm", "architecture": {"model_type": "llama"}}
    now = config_from({"task": task, "output_dir": "run"}, TASKS)
    then = now.model_dump(mode="json")
    assert changed_settings(now, then) == {}
    then["task"]["architecture"]["hidden_act"] = "relu"
    assert list(changed_settings(now, then)) == ["task.architecture"]
