"""A task is frozen settings, and what a run finds out is an object of its own."""

from collections.abc import Iterator

import pytest
import torch
from pydantic import BaseModel, ValidationError
from torch import nn

from src.tasks.base import ContextParallel, Task, TaskState
from tests.launching import PROJECT
from train import run_settings


class Words(Task):
    """Finds out what there is to find in its data, as text tasks do."""

    name: str = "words"
    size: int = 3

    def build_datasets(self) -> tuple[list[str], list[str]]:
        words = [*"abcdef"[: self.size]]
        self.state.data["labels"] = words
        self.state.notes.append(f"{self.size} words")
        return words, words

    def build_model(self) -> nn.Module:
        return nn.Linear(len(self.state.data["labels"]), self.size)

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
