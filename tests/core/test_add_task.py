"""A new task is one file and one line: a copy of the project gets one, and trains it under every strategy."""

import re
import sys
from pathlib import Path

import pytest
from safetensors.torch import load_file

from src.tasks.task_checks import MUST_RETURN
from tests.launching import PROJECT, Launch, Rounding, Run, Whole, project_with_task, run_command

TASK = '''
"""Separate light pixels from dark ones. Images count one to three times; the loss sums over pixels."""

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


class Pixels(Task):
    name: Literal["pixels"] = "pixels"
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
        noise = torch.randn(34, 8, 8, generator=torch.Generator().manual_seed(0))
        examples = [{"images": n, "masks": n > 0.5, "times": 1 + i % 3, "index": i} for i, n in enumerate(noise)]
        return examples[9:], examples[:9]

    def count(self, batch):
        return {"targets": int(batch["times"].sum())}

    def loss(self, model, batch):
        return self.evaluate(model, batch)[0]

    def evaluate(self, model, batch):
        logits = model(batch["images"].unsqueeze(1)).float()
        losses = binary_cross_entropy_with_logits(logits, batch["masks"].float(), reduction="none")
        return (losses.sum((1, 2)) * batch["times"]).sum(), {"masks": logits > 0, "index": batch["index"]}

    def metrics(self, outputs):
        return {"masks": len(outputs["masks"]), "in_order": float(outputs["index"].tolist() == [*range(9)])}

    def tables(self, outputs, dataset):
        pairs = zip(dataset, outputs["masks"])
        rows = [{"truth": picture(e["masks"]), "prediction": picture(m), "index": e["index"]} for e, m in pairs]
        return {"shown": rows}
'''
ARGUMENTS = (
    "--task.name=pixels", "--task.layers.width=3", "--task.title=it's \"quoted\"", "--task.folder=my data",
    "--global_batch_size=4", "--epochs=2", "--log_every=1", "--optim.lr=1e-3",
)  # fmt: skip
"""Epochs of 7 steps: the last one has an example for one of two processes."""
WATCHED = """
import os, accelerate
gather = accelerate.Accelerator.gather
def watched(self, tensor):
    if tensor.ndim == 3:
        os.write(1, f"gathered {tuple(tensor.shape)}\\n".encode())  # whole lines: print writes the end by itself
    return gather(self, tensor)
accelerate.Accelerator.gather = watched
"""


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return project_with_task(tmp_path_factory.mktemp("project"), "Pixels", TASK)


@pytest.fixture(scope="module")
def alone(whole: Whole, project: Path) -> Run:
    return whole("cpu", *ARGUMENTS, project=project)


@pytest.fixture(scope="module")
def sharded(whole: Whole, project: Path) -> Run:
    return whole("fsdp", *ARGUMENTS, project=project, before=WATCHED)


def test_a_new_task_has_the_same_curve_under_every_strategy(
    whole: Whole, rounding: Rounding, project: Path, alone: Run, sharded: Run
) -> None:
    """And the same norms of gradients, whose scale AdamW hides."""
    for run in (whole("ddp", *ARGUMENTS, project=project), sharded):
        for name in ("train/loss", "train/grad_norm", "eval/loss"):
            found, expected = ([r[name] for r in of.records if name in r] for of in (run, alone))
            assert found == pytest.approx(expected, rel=rounding("cpu", *ARGUMENTS, name=name, project=project))
        assert (run.summary["eval/in_order"], run.summary["eval/examples"]) == (1, 9)


def test_large_outputs_are_kept_for_the_first_examples_only(alone: Run, sharded: Run) -> None:
    """Keep 7 of 9 masks, in order: each of two processes sends its 4."""
    assert {line for line in sharded.stdout.splitlines() if "gathered" in line} == {"gathered (4, 8, 8)"}
    one, other = ([record for record in run.records if "eval/loss" in record][-1] for run in (alone, sharded))
    assert other["eval/masks"] == 7
    assert [row["index"] for row in one["eval/shown"]] == [*range(7)]
    assert one["eval/shown"] == other["eval/shown"]
    assert len({row["prediction"] for row in one["eval/shown"]}) > 3


def test_a_sum_over_uncounted_labels_is_noted_once(alone: Run, sharded: Run, launch: Launch, project: Path) -> None:
    """By the first process, under FSDP too, and by --check, which finds nothing else."""
    for run in (alone, sharded, launch("cpu", *ARGUMENTS, "--check", project=project).succeeded()):
        (note,) = [line for line in run.stdout.splitlines() if line.startswith("NOTE")]
        found = re.match(r"NOTE: Pixels.loss sums over (\d+) labels where Pixels.count counts (\d+) targets, so", note)
        assert found
        assert int(found[1]) == 64 * int(found[2])


def test_a_model_card_has_the_code_that_builds_the_model(sharded: Run, project: Path) -> None:
    """With the task's settings: in a group, quoted and of another type."""
    (code,) = re.findall(r"```python\n(.*?)```", (sharded.folder / "model/README.md").read_text(), re.DOTALL)
    assert "Pixels(layers={'width': 3}, title='it\\'s \"quoted\"', folder='my data').load_export(" in code
    shown = "\nprint(sum(weight.double().sum().item() for weight in model.state_dict().values()))"
    printed = run_command([sys.executable, "-c", code + shown], sharded.folder, cwd=project).succeeded().stdout
    weights = load_file(sharded.folder / "model/model.safetensors").values()
    assert float(printed) == sum(weight.double().sum().item() for weight in weights)


def test_a_misspelt_metric_costs_no_step(launch: Launch, project: Path) -> None:
    """The run ends at the first evaluation, after it has saved."""
    arguments = (*ARGUMENTS, "--early_stopping.patience=1")
    run = launch("ddp", *arguments, "--early_stopping.metric=eval/in_oder", project=project)
    assert run.messages == [
        "train.py: early_stopping.metric=eval/in_oder: the evaluation has no such metric, did you mean eval/in_order? "
        "(eval/loss, eval/examples, eval/masks, eval/in_order); choose another one, and the same command resumes at "
        "step 7"
    ]
    better = "--early_stopping.metric=eval/loss"
    again = launch("cpu", *arguments, better, project=project, folder=run.folder).succeeded()
    assert "after step 7, from" in again.stdout
    assert [record["step"] for record in again.records if "eval/loss" in record] == [7, 14]


MEAN = "loss = lambda _, model, batch: mse_loss(model(batch['images'].unsqueeze(1)), batch['images'])"
NO_TARGETS = "count = lambda *_: {'targets': 0}"


@pytest.mark.parametrize(
    ("method", "says"),
    [
        (MEAN, f"Pixels.loss must return {MUST_RETURN['loss']}"),
        (NO_TARGETS, "the evaluation set has nothing to predict: Task.count finds no targets in it"),
    ],
    ids=["a mean", "no targets"],
)
def test_a_wrong_return_value_is_refused_in_one_line(launch: Launch, project: Path, method: str, says: str) -> None:
    """Other values: test_tables.py."""
    before = f"from torch.nn.functional import mse_loss\nfrom src.tasks.pixels import Pixels\nPixels.{method}"
    run = launch("ddp", *ARGUMENTS, project=project, before=before)
    assert (run.exit_code, run.messages) == (2, [f"train.py: {says}"])
    assert "Traceback" not in run.stderr


def test_the_task_in_the_readme_trains_as_it_stands(launch: Launch, tmp_path: Path) -> None:
    """In at most 25 lines, sharded."""
    (code,) = re.findall(r"```python\n(import torch.*?)```", (PROJECT / "README.md").read_text(), re.DOTALL)
    assert code.count("\n") <= 25
    project = project_with_task(tmp_path, "Mine", code)
    run = launch("fsdp", "--task.name=mine", "--task.width=256", "--max_steps=30", project=project).succeeded()
    assert run.summary["parameters"] == 256 * (8 + 1) + 256 + 1
    assert run.summary["eval/loss"] < run.records[0]["eval/loss"]
