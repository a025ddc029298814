"""A task is frozen settings; what a run finds out about its data is a state of its own."""

from dataclasses import replace
from functools import cached_property
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from pydantic import BaseModel, ValidationError
from torch import nn

from src.tasks.base import ContextParallel, Task, TaskState
from src.training.run import build_data
from train import run_settings


class Words(Task):
    """Finds out about its data, as text tasks do."""

    name: str = "words"
    size: int = 3

    @cached_property
    def width(self) -> int:
        return 2 * self.size

    def build_datasets(self) -> tuple[list[str], list[str]]:
        words = [*"abcdef"[: self.size]]
        self.state.data["labels"] = words
        self.state.optimizations.append(f"{self.size} words")
        return words, words

    def build_model(self) -> nn.Module:
        return nn.Linear(len(self.state.data["labels"]), self.width)

    def count(self, batch: list[str]) -> dict[str, float]:
        return {"targets": len(batch)}

    def loss(self, model: nn.Module, batch: list[str]) -> torch.Tensor:
        raise NotImplementedError


def test_nothing_can_write_into_validated_settings() -> None:
    """In any group."""
    groups: list[BaseModel] = [run_settings([])]
    for group in groups:
        for field in type(group).model_fields:
            value = getattr(group, field)
            groups += [value] if isinstance(value, BaseModel) else []
            with pytest.raises(ValidationError, match="frozen"):
                setattr(group, field, value)
    assert len(groups) > 4


def test_runs_with_the_same_settings_share_no_state() -> None:
    settings = Words()
    one, other = settings.bind(TaskState()), settings.bind(TaskState(dtype=torch.bfloat16))
    one.build_datasets()
    found = TaskState(data={"labels": ["a", "b", "c"]}, optimizations=["3 words"])
    assert (one.state, other.state, settings.state) == (found, TaskState(dtype=torch.bfloat16), TaskState())
    changed = one.model_copy(update={"size": 2})
    changed.build_datasets()
    changed.state.cp = ContextParallel(1, 2)
    assert one.state == found
    assert (one.width, changed.width) == (6, 4)  # cached by each
    again = one.bind(replace(one.state, optimizations=[]))  # as for a comparison by --check
    assert (again.build_model().in_features, again.state.optimizations) == (3, [])


def test_a_task_knows_its_share_of_examples_before_it_reads_data(monkeypatch: pytest.MonkeyPatch) -> None:
    """Under context parallelism, when it builds the data and when it collates."""
    seen: list[ContextParallel] = []

    class Sharing(Words):
        def build_datasets(self) -> tuple[list[str], list[str]]:
            seen.append(self.state.cp)
            return super().build_datasets()

        def collate(self, samples: list[str]) -> list[str]:
            seen.append(self.state.cp)
            return samples

    accelerator: Any = SimpleNamespace(num_processes=1)
    config = run_settings([]).model_copy(update={"task": Sharing()})
    part = ContextParallel(0, 2, "group")
    monkeypatch.setattr("src.training.run.context_parallel", lambda _: part)
    train, _ = build_data(config, accelerator)
    config.task.collate(train)
    assert {*seen} == {part}


def test_an_export_loads_without_the_pretrained_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else a task of pictures would download them, or miss their file."""
    seen = list[bool]()

    def build(task: Words) -> nn.Module:
        seen.append(task.state.is_trained)
        return nn.Linear(1, 1)

    monkeypatch.setattr(Words, "build_model", build)
    Words().export(nn.Linear(1, 1), dict(nn.Linear(1, 1).state_dict()), tmp_path)
    Words().load_export(tmp_path)
    assert seen == [True]
