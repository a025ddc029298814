"""A task is frozen settings, and what a run finds out is an object of its own."""

import re
import shutil
from collections.abc import Iterator
from dataclasses import replace
from functools import cached_property
from pathlib import Path

import pytest
import torch
from pydantic import BaseModel, ValidationError
from torch import nn

from src.tasks.base import ContextParallel, Task, TaskState
from tests.launching import PROJECT, Launch
from train import run_settings


class Words(Task):
    """Finds out what there is to find in its data, as text tasks do."""

    name: str = "words"
    size: int = 3

    @cached_property
    def width(self) -> int:
        return 2 * self.size

    def build_datasets(self) -> tuple[list[str], list[str]]:
        words = [*"abcdef"[: self.size]]
        self.state.data["labels"] = words
        self.state.notes.append(f"{self.size} words")
        return words, words

    def build_model(self) -> nn.Module:
        return nn.Linear(len(self.state.data["labels"]), self.width)

    def count(self, batch: list[str]) -> dict[str, float]:
        return {"targets": len(batch)}

    def loss(self, model: nn.Module, batch: list[str]) -> torch.Tensor:
        raise NotImplementedError


def groups(settings: BaseModel) -> Iterator[BaseModel]:
    yield settings
    for name in type(settings).model_fields:
        value = getattr(settings, name)
        if isinstance(value, BaseModel):
            yield from groups(value)


@pytest.mark.parametrize(
    "name",
    [
        "mnist",
        "image_classification",  # room: examples
        "tabular_regression",  # room: examples
    ],
)
def test_nothing_can_write_into_settings_after_validation(name: str) -> None:
    """In any group. Tried with a group that is not frozen."""
    config = run_settings([f"--task.name={name}", f"--task.data_dir={PROJECT}"][: 1 + (name == "mnist")])
    for group in groups(config):
        for field in type(group).model_fields:
            with pytest.raises(ValidationError, match="frozen"):
                setattr(group, field, getattr(group, field))


def test_runs_of_the_same_settings_share_nothing_that_they_find_out() -> None:
    """Tried with a shallow copy of the state, and with pydantic's own model_copy: the other run has the labels too."""
    settings = Words()
    one, other = settings.begin(TaskState()), settings.begin(TaskState(dtype=torch.bfloat16))
    one.build_datasets()
    assert one.state.data == {"labels": ["a", "b", "c"]}
    assert one.state.notes == ["3 words"]
    assert (other.state, settings.state) == (TaskState(dtype=torch.bfloat16), TaskState())
    changed = one.model_copy(update={"size": 2})
    changed.build_datasets()
    changed.state.cp = ContextParallel(1, 2)
    assert one.state == TaskState(data={"labels": ["a", "b", "c"]}, notes=["3 words"])


def test_a_copy_with_other_settings_keeps_nothing_that_followed_from_the_old_ones() -> None:
    """Tried without: the width is that of three words."""
    one = Words()
    assert (one.width, one.model_copy(update={"size": 2}).width) == (6, 4)


def test_a_run_whose_task_is_compared_begins_again_with_what_the_data_hold() -> None:
    one = Words().begin(TaskState())
    one.build_datasets()
    again = one.begin(replace(one.state, notes=[]))
    assert (again.build_model().in_features, again.state.notes) == (3, [])


def test_the_task_in_the_readme_is_complete_and_trains_as_it_stands_there(  # room: template
    launch: Launch, tmp_path: Path
) -> None:
    """In at most 25 lines, sharded. Tried without its blocks: FSDP has nothing to shard."""
    (code,) = re.findall(r"```python\n(import torch.*?)```", (PROJECT / "README.md").read_text(), re.DOTALL)
    assert code.count("\n") <= 25
    for name in ("src", "accelerate_configs"):
        shutil.copytree(PROJECT / name, tmp_path / name)
    shutil.copy(PROJECT / "train.py", tmp_path)
    (tmp_path / "src/tasks/mine.py").write_text(code)
    tasks = tmp_path / "src/tasks/__init__.py"
    tasks.write_text(tasks.read_text().replace("TASKS = {\n", 'TASKS = {\n    "mine": "src.tasks.mine:Mine",\n'))
    run = launch("fsdp", "--task.name=mine", "--task.width=256", "--max_steps=30", project=tmp_path).succeeded()
    assert run.summary["parameters"] == 256 * (8 + 1) + 256 + 1
    assert run.summary["eval/loss"] < run.records[0]["eval/loss"]
