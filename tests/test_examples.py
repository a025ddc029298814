"""The examples: a task is a file, and trains the same under every strategy. Those on text: text/test_examples.py."""

import json
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from safetensors.torch import load_file
from sklearn.linear_model import Ridge
from torchvision.models import get_model

from examples.image_classification import ImageClassification
from examples.make_data import digits_png, friedman_csv
from examples.tabular_regression import TabularRegression
from src.process import UserError
from tests.launching import PROJECT, Launch, Run, Whole, needs, slow

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")  # in this process, to read
CURVE = ("--log_every=1", "--optim.lr=1e-4")  # small, as in test_parity.py
STEPS = (*CURVE, "--max_steps=8")


@pytest.fixture(scope="module")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, ...]:
    """Arguments that train a small model on the digits."""
    folder = tmp_path_factory.mktemp("digits")
    digits_png(folder)
    settings = (f"data_dir={folder}", "name=image_classification", "model=shufflenet_v2_x0_5", "size=64")
    return ("--config=examples/image_classification.yaml", *(f"--task.{setting}" for setting in settings))


@pytest.fixture(scope="module")
def table(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, ...]:
    file = tmp_path_factory.mktemp("table") / "friedman.csv"
    friedman_csv(file)
    settings = (f"csv={file}", "name=tabular_regression")
    return ("--config=examples/tabular_regression.yaml", *(f"--task.{setting}" for setting in settings))


def assert_same(run: Run, alone: Run) -> None:
    assert run.losses == pytest.approx(alone.losses, rel=1e-5)
    metrics = {name: value for name, value in alone.summary.items() if name.startswith("eval/")}
    assert {name: run.summary[name] for name in metrics} == pytest.approx(metrics, rel=1e-4)


def assert_evaluated(launch: Launch, run: Run, part: str, folder: Path) -> None:
    words = (str(run.folder / part), f"--output={folder}/predictions.parquet")
    found = json.loads(launch("cpu", *words, script="src/evaluate.py").succeeded().stdout)
    assert found == pytest.approx({name: run.summary[name] for name in found}, rel=1e-6)
    assert len(pq.read_table(words[1].partition("=")[2])) == found["eval/examples"]


@pytest.mark.parametrize("example", ["pictures", "table"])
def test_the_curve_is_the_same_under_every_strategy(whole: Whole, request: pytest.FixtureRequest, example: str) -> None:
    arguments = (*request.getfixturevalue(example), *STEPS)
    alone = whole("cpu", *arguments)
    for yaml in ("ddp", "fsdp"):
        run = whole(yaml, *arguments, processes=2)
        assert_same(run, alone)
    assert run.summary["strategy"] == "fsdp"


@needs("src/evaluate.py")
@pytest.mark.parametrize("example", ["pictures", "table"])
@pytest.mark.parametrize("part", ["model", "checkpoints/step_00000008"])
def test_its_metrics_are_those_of_the_training(
    launch: Launch, whole: Whole, request: pytest.FixtureRequest, tmp_path: Path, example: str, part: str
) -> None:
    """From what FSDP exported, and from its checkpoint."""
    run = whole("fsdp", *request.getfixturevalue(example), *STEPS, processes=2)
    assert_evaluated(launch, run, part, tmp_path)


def test_an_mlp_beats_ridge_regression(launch: Launch, table: tuple[str, ...]) -> None:
    """With the figures in the config."""
    run = launch("cpu", *table).succeeded()
    task = TabularRegression(csv=table[1].partition("=")[2])
    (inputs, targets, _), (eval_inputs, eval_targets, _) = (part.tensors for part in task.build_datasets())
    scale = task.data_state()["std"]["y"]
    errors = Ridge().fit(inputs, targets).predict(eval_inputs) - eval_targets.numpy()
    assert scale * np.sqrt(np.mean(errors**2)) == pytest.approx(2.70, abs=0.01)
    assert run.summary["eval/rmse"] < 1.35
    assert run.summary["eval/r2"] > 0.95


@pytest.mark.slow
def test_a_resnet_reads_the_digits(launch: Launch, pictures: tuple[str, ...]) -> None:
    run = launch("cpu", *pictures[:3]).succeeded()
    assert run.summary["eval/accuracy"] >= 0.97


def test_batch_norm_depends_on_the_processes_but_not_on_the_strategy(whole: Whole, pictures: tuple[str, ...]) -> None:
    """Its statistics are the first process's for all, as DDP has them. Tried without sending them: under FSDP the
    evaluation has another loss than under DDP."""
    arguments = (*pictures, *STEPS, "--task.norm=batch")
    alone, ddp, fsdp = whole("cpu", *arguments), *(whole(yaml, *arguments, processes=2) for yaml in ("ddp", "fsdp"))
    assert ddp.losses[0] != pytest.approx(alone.losses[0], rel=1e-3)
    assert_same(fsdp, ddp)


@needs("src/evaluate.py")
def test_fsdp_exports_the_statistics_that_it_evaluates(
    launch: Launch, whole: Whole, pictures: tuple[str, ...], tmp_path: Path
) -> None:
    """Tried without sending them: the export has another loss."""
    run = whole("fsdp", *pictures, *STEPS, "--task.norm=batch", processes=2)
    assert_evaluated(launch, run, "model", tmp_path)


def test_a_stopped_run_continues_to_the_last_bit(launch: Launch, table: tuple[str, ...]) -> None:
    whole = launch("fsdp", *table, *STEPS, processes=2).succeeded()
    part = launch("fsdp", *table, *CURVE, "--max_steps=5", processes=2).succeeded()
    run = launch("fsdp", *table, *STEPS, processes=2, folder=part.folder).succeeded()
    assert run.losses[-3:] == whole.losses[-3:]
    weights, expected = (load_file(r.folder / "model" / "model.safetensors") for r in (run, whole))
    assert all(torch.equal(weights[name], expected[name]) for name in expected)


@needs("src/check")
@pytest.mark.parametrize(("example", "yaml"), [slow("pictures", "fsdp"), ("pictures", "ddp"), ("table", "fsdp")])
def test_the_check_finds_no_fault(launch: Launch, request: pytest.FixtureRequest, example: str, yaml: str) -> None:
    run = launch(yaml, *request.getfixturevalue(example), "--check", processes=2).succeeded()
    assert "all checks passed" in run.stdout


def test_weights_come_from_a_file_and_their_statistics_stay(pictures: tuple[str, ...], tmp_path: Path) -> None:
    """All but the head, which is new. Tried without loading them into the frozen layers: a variance of 1."""
    theirs = get_model("resnet18")
    theirs.bn1.running_var.fill_(7.0)
    torch.save(theirs.state_dict(), tmp_path / "resnet.pth")
    task = ImageClassification(weights=str(tmp_path / "resnet.pth"), norm="frozen")
    task._classes = ["cat", "dog"]
    model = task.build_model().train()
    before = {name: buffer.clone() for name, buffer in model.named_buffers()}
    assert before["bn1.running_var"].eq(7).all()
    assert model(torch.randn(2, 3, 32, 32)).shape == (2, 2)
    assert all(torch.equal(buffer, before[name]) for name, buffer in model.named_buffers())
    assert torch.equal(model.layer1[0].conv1.weight, theirs.layer1[0].conv1.weight)
    assert model._no_split_modules == ["BasicBlock"]
    with pytest.raises(UserError, match=r"task.norm=group: weights that were trained with BatchNorm need frozen"):
        task.model_copy(update={"norm": "group"}).build_model()


def test_bad_pictures_are_one_line(launch: Launch, pictures: tuple[str, ...], tmp_path: Path) -> None:
    (tmp_path / "train" / "cat").mkdir(parents=True)
    (tmp_path / "train" / "cat" / "1.png").write_text("a cat")
    absent = launch("cpu", *pictures, f"--task.data_dir={tmp_path}")
    says = f"[Errno 2] No such file or directory: '{tmp_path}/val'"
    assert absent.messages == [
        f"train.py: task.data_dir (`python -m examples.make_data` makes data/digits_png): {says}"
    ]
    (tmp_path / "val").symlink_to(tmp_path / "train")
    broken = launch("ddp", *pictures, f"--task.data_dir={tmp_path}", "--global_batch_size=2", processes=2)
    assert broken.messages[0].startswith(f"train.py: {tmp_path}/train/cat/1.png: cannot be read, ")
    assert (absent.exit_code, broken.exit_code) == (2, 2)
    unknown = launch("cpu", *pictures, "--task.model=resnet19")
    assert unknown.messages[0].endswith("Unknown model resnet19")


def test_all_mistakes_in_a_csv_at_once(launch: Launch, table: tuple[str, ...], tmp_path: Path) -> None:
    file = tmp_path / "bad.csv"
    file.write_text("a,b,y\n1,x,2\n2,,3\n3,,\n")
    run = launch("cpu", *table, f"--task.csv={file}")
    hint = "task.categories lists the columns of categories"
    assert run.exit_code == 2
    assert run.messages == [
        f"train.py: {file}: has no column site",
        f"train.py: {file}: has fewer than 5 rows",
        f"train.py: {file}: b in row 1 is x, not a number; {hint}",
        f"train.py: {file}: y in row 3 is nan, not a number; {hint}",
    ]


def test_each_is_a_file_of_120_lines_at_most() -> None:
    for name in ("image_classification", "tabular_regression"):
        assert len((PROJECT / "examples" / f"{name}.py").read_text().splitlines()) <= 120
