"""A task is frozen settings, and what a run finds out is an object of its own."""

import re
import sys
from collections.abc import Iterator
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from pydantic import BaseModel, ValidationError
from safetensors.torch import load_file
from torch import nn

from src.tasks.base import ContextParallel, Task, TaskState
from src.training.run import build_data
from tests.launching import PROJECT, Launch, Run, project_with_task, run_command
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
        self.state.optimizations.append(f"{self.size} words")
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
    one, other = settings.bind(TaskState()), settings.bind(TaskState(dtype=torch.bfloat16))
    one.build_datasets()
    assert one.state.data == {"labels": ["a", "b", "c"]}
    assert one.state.optimizations == ["3 words"]
    assert (other.state, settings.state) == (TaskState(dtype=torch.bfloat16), TaskState())
    changed = one.model_copy(update={"size": 2})
    changed.build_datasets()
    changed.state.cp = ContextParallel(1, 2)
    assert one.state == TaskState(data={"labels": ["a", "b", "c"]}, optimizations=["3 words"])


def test_a_copy_with_other_settings_keeps_nothing_that_followed_from_the_old_ones() -> None:
    """Tried without: the width is that of three words."""
    one = Words()
    assert (one.width, one.model_copy(update={"size": 2}).width) == (6, 4)


def test_a_run_whose_task_is_compared_begins_again_with_what_the_data_hold() -> None:
    one = Words().bind(TaskState())
    one.build_datasets()
    again = one.bind(replace(one.state, optimizations=[]))
    assert (again.build_model().in_features, again.state.optimizations) == (3, [])


def test_a_task_knows_its_part_of_shared_examples_when_it_builds_and_collates(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tried with the part set after the evaluation set was looked at: it is alone in both."""
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
    for size in (1, 2):
        part = ContextParallel(0, size, "group")
        monkeypatch.setattr("src.training.run.context_parallel", lambda _, part=part: part)
        train, _ = build_data(config, accelerator)
        config.task.collate(train)
        assert {*seen} == {part}
        seen.clear()


SEGMENTATION = """
from pathlib import Path
from typing import ClassVar, Literal

import torch
from torch import nn
from torch.nn.functional import binary_cross_entropy_with_logits

from src.config.settings import Settings
from src.tasks.base import Task
from src.tasks.tables import picture


class Layers(Settings):
    width: int = 2
    kind: str = "conv"


class Segmentation(Task):
    name: Literal["segmentation"] = "segmentation"
    layers: Layers = Layers()
    title: str = ""
    folder: Path = Path("data")
    kept_outputs: ClassVar[dict[str, int]] = {"masks": 7}

    def build_model(self):
        first, last = nn.Conv2d(1, self.layers.width, 3, padding=1), nn.Conv2d(self.layers.width, 1, 1)
        model = nn.Sequential(nn.Sequential(first, nn.ReLU()), nn.Sequential(last, nn.Flatten(0, 1)))
        model._no_split_modules = ["Sequential"]
        return model

    def build_datasets(self):
        noise = torch.randn(25, 8, 8, generator=torch.Generator().manual_seed(0))
        examples = [{"images": image, "masks": image > 0.5, "index": i} for i, image in enumerate(noise)]
        return examples[9:], examples[:9]

    def count(self, batch):
        return {"targets": len(batch["images"])}

    def loss(self, model, batch):
        return self.evaluate(model, batch)[0]

    def evaluate(self, model, batch):
        logits = model(batch["images"].unsqueeze(1)).float()
        loss = binary_cross_entropy_with_logits(logits, batch["masks"].float(), reduction="sum")
        return loss, {"masks": logits > 0, "index": batch["index"]}

    def metrics(self, outputs):
        return {"masks": len(outputs["masks"]), "in_order": float(outputs["index"].tolist() == [*range(9)])}

    def tables(self, outputs, dataset):
        pairs = zip(dataset, outputs["masks"])
        rows = [{"truth": picture(e["masks"]), "prediction": picture(m), "index": e["index"]} for e, m in pairs]
        return {"shown": rows}
"""
"""Counts images where its loss sums over pixels."""
SETTINGS = ("--task.name=segmentation", "--task.layers.width=3", "--task.title=it's \"quoted\"",
            "--task.folder=my data", "--global_batch_size=4", "--max_steps=4", "--log_every=1")  # fmt: skip
WATCHED = """
import os, src.training.batches, accelerate
src.training.batches.cache_size = lambda _: 0  # batches as small as in training: the last one is a dummy on a process
gather = accelerate.Accelerator.gather
def watched(self, tensor):
    if tensor.ndim == 3:
        os.write(1, f"gathered {tuple(tensor.shape)}\\n".encode())  # whole lines: print writes the end by itself
    return gather(self, tensor)
accelerate.Accelerator.gather = watched
"""
LABELS = "NOTE: Segmentation.loss sums over {} labels where Segmentation.count counts {} targets, so the logged loss ("


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One with this task."""
    return project_with_task(tmp_path_factory.mktemp("project"), "Segmentation", SEGMENTATION)


@pytest.fixture(scope="module")
def alone(launch: Launch, project: Path) -> Run:
    return launch("cpu", *SETTINGS, project=project).succeeded()


@pytest.fixture(scope="module")
def sharded(launch: Launch, project: Path) -> Run:
    return launch("fsdp", *SETTINGS, project=project, before=WATCHED).succeeded()


def test_outputs_too_large_to_keep_are_kept_for_the_first_examples_alone(alone: Run, sharded: Run) -> None:
    """Pictures of 7 of 9 masks, in order, of which each of two processes sends its 4. Tried without: (5, 8, 8)."""
    assert [line for line in sharded.stdout.splitlines() if "gathered" in line] == ["gathered (4, 8, 8)"] * 2
    one, other = ([record for record in run.records if "eval/loss" in record][-1] for run in (alone, sharded))
    assert (other["eval/masks"], other["eval/in_order"], other["eval/examples"]) == (7, 1, 9)
    assert [row["index"] for row in one["eval/shown"]] == [*range(7)]
    assert one["eval/shown"] == other["eval/shown"]
    assert len({row["prediction"] for row in one["eval/shown"]}) > 3


def test_labels_that_are_not_counted_are_said_once(alone: Run, sharded: Run, launch: Launch, project: Path) -> None:
    """In the first step, by the first process, under FSDP too, and by --check, which finds nothing else. Tried with the
    mean over each image's pixels: silence."""
    check = launch("cpu", *SETTINGS, "--check", project=project).succeeded()
    for run, labels, targets in ((alone, 256, 4), (sharded, 128, 2), (check, 256, 4)):
        (line,) = [line for line in run.stdout.splitlines() if line.startswith("NOTE")]
        assert line.startswith(LABELS.format(labels, targets)), line
        assert "and the gradients are 64 times those of a mean over labels. If" in line


def test_the_card_of_a_task_has_the_lines_that_build_its_model(sharded: Run, project: Path) -> None:
    """With its settings, in a group, quoted and of another type; in a fresh interpreter."""
    (code,) = re.findall(r"```python\n(.*?)```", (sharded.folder / "model/README.md").read_text(), re.DOTALL)
    assert "Segmentation(layers={'width': 3}, title='it\\'s \"quoted\"', folder='my data').load_export(" in code
    shown = "\nprint(sum(weight.double().sum().item() for weight in model.state_dict().values()))"
    printed = run_command([sys.executable, "-c", code + shown], sharded.folder, cwd=project).succeeded().stdout
    weights = load_file(sharded.folder / "model/model.safetensors").values()
    assert float(printed) == sum(weight.double().sum().item() for weight in weights)


def test_an_export_needs_no_weights_that_its_model_started_from(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tried without: the task of pictures downloads them, or misses the file."""
    seen = list[bool]()

    def build(task: Words) -> nn.Module:
        seen.append(task.state.is_trained)
        return nn.Linear(1, 1)

    monkeypatch.setattr(Words, "build_model", build)
    Words().export(nn.Linear(1, 1), dict(nn.Linear(1, 1).state_dict()), tmp_path)
    Words().load_export(tmp_path)
    assert seen == [True]


def test_the_task_in_the_readme_is_complete_and_trains_as_it_stands_there(  # room: template
    launch: Launch, tmp_path: Path
) -> None:
    """In at most 25 lines, sharded. Tried without its blocks: FSDP has nothing to shard."""
    (code,) = re.findall(r"```python\n(import torch.*?)```", (PROJECT / "README.md").read_text(), re.DOTALL)
    assert code.count("\n") <= 25
    project = project_with_task(tmp_path, "Mine", code)
    run = launch("fsdp", "--task.name=mine", "--task.width=256", "--max_steps=30", project=project).succeeded()
    assert run.summary["parameters"] == 256 * (8 + 1) + 256 + 1
    assert run.summary["eval/loss"] < run.records[0]["eval/loss"]
