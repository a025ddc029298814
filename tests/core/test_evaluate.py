"""src.tools.evaluate has the metrics of training; src.tools.checkpoints lists, verifies and exports."""

import json
import re
import shutil
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest

from src.tasks.mnist import bundled_digits
from src.tools.checkpoints import main as checkpoints_main
from src.tools.evaluate import main
from tests.faults.runs import ALL
from tests.launching import Launch, Run, Tool, Whole


@pytest.fixture
def evaluate(capfd: pytest.CaptureFixture[str]) -> Tool:
    return Tool("evaluate", main, capfd)


@pytest.fixture
def checkpoints(capfd: pytest.CaptureFixture[str]) -> Tool:
    return Tool("checkpoint", checkpoints_main, capfd)


@pytest.fixture
def run(whole: Whole) -> Run:
    """A run with checkpoints of steps 4, 8, 12 and 14."""
    return whole("fsdp", *ALL)


@pytest.mark.parametrize("part", ["", "model", "checkpoints/step_00000014"])
def test_an_evaluation_has_the_metrics_of_training(evaluate: Tool, run: Run, tmp_path: Path, part: str) -> None:
    output = tmp_path / "new" / "predictions.parquet"
    metrics = json.loads(evaluate(run.folder / part, f"--output={output}").succeeded().stdout)
    assert metrics == pytest.approx({name: run.summary[name] for name in metrics}, rel=1e-6)
    assert set(metrics) == {"eval/loss", "eval/examples", "eval/accuracy"}
    table = pq.read_table(output).to_pydict()
    assert [*map(int, table["label"])] == bundled_digits()[1].labels.tolist()
    assert np.mean(np.equal(table["label"], table["prediction"])) == metrics["eval/accuracy"]
    probabilities = [table[f"probability_{digit}"] for digit in range(10)]
    assert [str(digit) for digit in np.argmax(probabilities, 0)] == table["prediction"]


def test_all_mistakes_of_an_evaluation_are_refused_at_once(evaluate: Tool, run: Run, tmp_path: Path) -> None:
    refused = evaluate(run.folder, "--task.source=digts", "--task.sorce", "digits", "--shift=2", "bla")
    assert refused.stderr.splitlines() == [
        "evaluate: bla: not understood; settings are written --name=value",
        "evaluate: --shift=2: only settings of the task that choose the data can be changed here",
        "evaluate: --task.source=digts: must be 'mnist' or 'digits'",
        "evaluate: --task.sorce=digits: unknown setting, did you mean task.source?",
    ]
    (link := tmp_path / "link").symlink_to("nowhere")  # a file that another user may have chosen
    assert evaluate(run.folder, f"--output={link}").stderr.startswith(f"evaluate: {link}: already exists; ")
    says = "neither a run's output folder, nor a model, nor a checkpoint"
    assert evaluate(tmp_path).stderr == f"evaluate: {tmp_path}: {says}\n"


def test_checkpoints_are_listed_newest_first(launch: Launch, run: Run) -> None:
    done = launch("cpu", "list", str(run.folder), script="src/tools/checkpoints.py").succeeded()
    listed = re.split(r"\n(?! )", done.stdout)
    for step, about in zip((14, 12, 8, 4), listed[:4], strict=True):
        assert re.match(rf"\S*/step_{step:08d} .*14.[45] MB.*fsdp x 2$", about.splitlines()[0])
    assert f"\n  eval/loss {run.summary['eval/loss']:.4f}  eval/accuracy " in listed[0]
    assert "eval" not in listed[1]


def test_an_exported_checkpoint_is_what_the_run_exported(checkpoints: Tool, run: Run, tmp_path: Path) -> None:
    copied = Path(shutil.copytree(run.folder, tmp_path / "run"))
    folder = copied / "model_step_00000014"
    assert checkpoints("export", copied).succeeded().stdout == f"{folder}\n"
    for name in ("model.safetensors", "README.md"):
        assert (folder / name).read_bytes() == (run.folder / "model" / name).read_bytes()
    assert checkpoints("export", copied).stderr == f"checkpoint: {folder}: already exists; choose another folder\n"
    checkpoints("export", copied / "checkpoints/step_00000012", f"--output={copied}/older").succeeded()
    assert (copied / "older/model.safetensors").read_bytes() != (folder / "model.safetensors").read_bytes()


def test_a_damaged_checkpoint_is_found(checkpoints: Tool, run: Run, tmp_path: Path) -> None:
    checkpoint = Path(shutil.copytree(run.folder / "checkpoints/step_00000014", tmp_path / "step_00000014"))
    assert "DAMAGED" not in checkpoints("verify", checkpoint).succeeded().stdout
    shard, *_ = sorted(checkpoint.glob("shard-*"))
    shard.write_bytes(shard.read_bytes()[:-1] + b"!")
    found = checkpoints("verify", checkpoint)
    says = f"{checkpoint}  DAMAGED: {shard.name} has changed since it was saved\n"
    assert (found.exit_code, found.stdout) == (1, says)
