"""Adding a task is one file and one line: here a copy of the project gets one, and trains it under FSDP."""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from torch.nn.functional import cross_entropy, mse_loss
from torch.utils.data import IterableDataset, TensorDataset

from src.config.errors import UserError
from src.tasks.mnist import Mnist
from src.tasks.returned import require_right, require_sum
from tests.launching import PROJECT, Launch, Rounding, Whole, needs

TASK = '''
"""Learn the mean of a ragged number of values: most examples count for several, some for none."""

from typing import Literal

import torch
from torch import nn

from src.tasks import load_metric
from src.tasks.base import Task


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, x):
        return x + self.linear(x).relu()


class Sign(Task):
    name: Literal["sign"] = "sign"
    """The task."""
    width: int = 16
    """Of each layer."""

    def build_model(self):
        model = nn.Sequential(nn.Linear(8, self.width), Block(self.width), Block(self.width), nn.Linear(self.width, 2))
        model._no_split_modules = ["Block"]
        return model

    def build_datasets(self):
        generator = torch.Generator().manual_seed(0)
        inputs = torch.randn(500, 8, generator=generator)
        labels = (inputs.sum(1) > 0).long()
        counts = torch.randint(0, 4, (500,), generator=generator)
        examples = list(zip(inputs, labels, counts))
        return examples[:403], examples[403:]

    def count_targets(self, batch):
        return int(batch[2].sum())

    def loss(self, model, batch):
        return self.evaluate(model, batch)[0]

    def evaluate(self, model, batch):
        inputs, labels, counts = batch
        logits = model(inputs).float()
        losses = nn.functional.cross_entropy(logits, labels, reduction="none")
        return (losses * counts).sum(), {"predictions": logits.argmax(1), "references": labels}

    def metrics(self, outputs):
        return load_metric("Accuracy").compute(**outputs)
'''
ARGUMENTS = (
    "--task.name=sign", "--task.width=32", "--epochs=4", "--optim.lr=0.02", "--global_batch_size=32",
    "--micro_batch_size=8",
)  # fmt: skip


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    copy = tmp_path_factory.mktemp("project") / "copy"
    for name in ("src", "accelerate_configs"):
        shutil.copytree(PROJECT / name, copy / name)
    shutil.copy(PROJECT / "train.py", copy)
    (copy / "src/tasks/sign.py").write_text(TASK)
    registry = copy / "src/tasks/__init__.py"
    line = '    "sign": "src.tasks.sign.Sign",'
    registry.write_text(registry.read_text().replace("TASKS = {\n", f"TASKS = {{\n{line}\n"))
    return copy


def test_a_new_task_trains_the_same_under_every_strategy(
    launch: Launch, whole: Whole, rounding: Rounding, project: Path
) -> None:
    alone, within = whole("cpu", *ARGUMENTS, project=project), rounding("cpu", *ARGUMENTS, project=project)
    assert alone.summary["eval/accuracy"] > 0.9
    for yaml, processes in (("ddp", 2), ("fsdp", 4)):
        run = launch(yaml, *ARGUMENTS, project=project, processes=processes).succeeded()
        assert run.losses == pytest.approx(alone.losses, rel=within)
        assert run.summary["eval/accuracy"] == alone.summary["eval/accuracy"]
        assert run.summary["eval/examples"] == 97


@needs("src/check")
@pytest.mark.parametrize("yaml", [pytest.param("ddp", marks=pytest.mark.slow), "fsdp"])
def test_it_is_examined_by_its_normal_methods_alone(launch: Launch, project: Path, yaml: str) -> None:
    run = launch(yaml, *ARGUMENTS, "--check", project=project, processes=2).succeeded()
    assert "all checks passed" in run.stdout


def test_what_it_does_not_say_of_its_metrics_beforehand_costs_no_step(  # room: best
    launch: Launch, project: Path
) -> None:
    """A misspelt one ends the run once it is evaluated, and saved. Tried with saving after: the epoch is lost."""
    arguments = (*ARGUMENTS, "--epochs=2", "--early_stopping.patience=1")
    run = launch("ddp", *arguments, "--early_stopping.metric=eval/acuracy", project=project, processes=2)
    assert run.messages == [
        "train.py: early_stopping.metric=eval/acuracy: the evaluation has no such metric, did you mean eval/accuracy? "
        "(eval/loss, eval/examples, eval/accuracy); with another one, the same command continues from step 13"
    ]
    better = "--early_stopping.metric=eval/loss"
    again = launch("cpu", *arguments, better, project=project, folder=run.folder).succeeded()
    assert "after step 13, from" in again.stdout
    assert [record["step"] for record in again.records if "eval/loss" in record] == [13, 26]


@needs("src/tools/evaluate.py")
def test_it_is_evaluated_outside_of_its_run_without_a_line_more(launch: Launch, project: Path) -> None:
    """From its export, and from a checkpoint of FSDP."""
    (project / "evaluate_it.py").write_text("import sys\nfrom src.tools.evaluate import main\nmain(sys.argv[1:])\n")
    run = launch("fsdp", *ARGUMENTS, project=project, processes=2).succeeded()
    for part in ("model", "checkpoints/step_00000052"):
        words = (str(run.folder / part), f"--output={run.folder}/{part.partition('/')[0]}.parquet")
        done = launch("cpu", *words, project=project, script="evaluate_it.py").succeeded()
        metrics = json.loads(done.stdout)
        assert metrics == pytest.approx({name: run.summary[name] for name in metrics}, rel=1e-6)
        table = pq.read_table(words[1].removeprefix("--output=")).to_pydict()
        assert {name: len(column) for name, column in table.items()} == {"predictions": 97, "references": 97}


def test_its_settings_are_checked_and_documented_like_any(launch: Launch, project: Path) -> None:
    run = launch("cpu", "--task.name=sign", "--task.widht=3", project=project)
    assert run.messages == ["train.py: --task.widht=3: unknown setting, did you mean task.width?"]


class Stream(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        yield from range(4)

    def __len__(self) -> int:
        return 4


LOSS = torch.tensor(3.0)
ROWS = torch.zeros(4)
DATASET = TensorDataset(ROWS)
SUM = "the loss summed over its targets, not their mean, as a tensor of shape ()"
WRONG: dict[str, list[Any]] = {
    "build_datasets": [DATASET, (DATASET, Stream()), (iter(DATASET), DATASET), (DATASET,) * 3, None],
    "loss": [3.0, ROWS, (LOSS,), (LOSS, 4), None],
    "evaluate": [LOSS, (LOSS, 4, {}), (LOSS, ROWS), (LOSS, {"a": LOSS}), (LOSS, {"a": [1]}), (3.0, {})],
    "metrics": [{"accuracy": "good"}, {"accuracy": LOSS}, {"accuracy": None}, {"accuracy": np.float32(1)}, 0.5, None],
}
RIGHT: dict[str, list[Any]] = {
    "build_datasets": [(DATASET, DATASET), [[1], [2, 3]]],
    "loss": [LOSS],
    "evaluate": [(LOSS, {}), [LOSS, {"a": ROWS, "b": torch.zeros(4, 2)}]],
    "metrics": [{}, {"accuracy": 1}, {"accuracy": 0.5, "other": np.float64(0.5)}],
}
MUST_RETURN = {
    "build_datasets": "two map-style datasets, to train and to evaluate on, each with a length and an index",
    "loss": SUM,
    "evaluate": f"two values: {SUM}, and tensors of shape (examples, ...) by name",
    "metrics": "numbers by name, which float() makes of a tensor",
}


@pytest.mark.parametrize("method", list(MUST_RETURN))
def test_a_method_that_returns_something_else_is_named(method: str) -> None:
    for value in WRONG[method]:
        with pytest.raises(UserError) as error:
            require_right(Mnist(), method, value)
        assert str(error.value) == f"Mnist.{method} must return {MUST_RETURN[method]}"
    for value in RIGHT[method]:
        require_right(Mnist(), method, value)


def test_a_mean_is_refused_where_autograd_tells(monkeypatch: pytest.MonkeyPatch) -> None:
    """And nothing that may be a sum: a mean of one target, times their number, or beside something else."""
    logits, labels = torch.randn(4, 3, requires_grad=True), torch.tensor([0, 1, 2, 0])

    def examined(loss: torch.Tensor, targets: int) -> None:
        monkeypatch.setattr(Mnist, "count_targets", lambda *_: targets)
        require_sum(Mnist(), loss, None)

    mean = cross_entropy(logits, labels)
    for loss, number in ((mean, 4), (mse_loss(logits, logits.detach() + 1), 12)):
        with pytest.raises(UserError, match=r"^Mnist.loss must return the loss summed"):
            examined(loss, number)
    sums = cross_entropy(logits, labels, reduction="sum"), mean * 4, mean + logits.square().sum(), logits.exp().sum()
    for loss, number in ((mean, 1), *((loss, 4) for loss in sums)):
        examined(loss, number)


@pytest.mark.parametrize(
    ("yaml", "method", "returns", "arguments"),
    [
        ("ddp", "loss", "nn.functional.cross_entropy(model(batch[0]), batch[1])", ()),
        ("fsdp", "metrics", "{'accuracy': 'good'}", ()),
        pytest.param("cpu", "loss", "0.5", ("--check",), marks=needs("src/check")),
    ],
)
def test_it_takes_a_run_one_line_to_say_so(
    launch: Launch, project: Path, yaml: str, method: str, returns: str, arguments: tuple[str, ...]
) -> None:
    """In its first step, its first evaluation, and its examination."""
    head = "from torch import nn\nfrom src.tasks.sign import Sign\n"
    before = f"{head}def method(self, model, batch=None):\n    return {returns}\nSign.{method} = method"
    run = launch(yaml, *ARGUMENTS, "--epochs=1", *arguments, project=project, before=before)
    assert run.exit_code == 2
    assert run.messages == [f"train.py: Sign.{method} must return {MUST_RETURN[method]}"]
    assert "Traceback" not in run.stderr
