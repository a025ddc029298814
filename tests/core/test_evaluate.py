"""python -m src.tools.evaluate: metrics, predictions; src.tools.checkpoints: what there is, whether it is whole."""

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
def tool(capfd: pytest.CaptureFixture[str]) -> Tool:
    return Tool("evaluate", main, capfd)


@pytest.fixture(scope="module")
def run(whole: Whole) -> Run:
    return whole("fsdp", *ALL)


@pytest.mark.parametrize("part", ["", "model", "checkpoints/step_00000014"])
def test_the_metrics_are_the_trainings_own(tool: Tool, run: Run, tmp_path: Path, part: str) -> None:
    """Of the export and of a checkpoint of FSDP on two processes. Tried without loading the weights: chance."""
    output = tmp_path / "new" / "predictions.parquet"
    metrics = json.loads(tool(run.folder / part, f"--output={output}").succeeded().stdout)
    assert metrics == pytest.approx({name: run.summary[name] for name in metrics}, rel=1e-6)
    assert set(metrics) == {"eval/loss", "eval/examples", "eval/accuracy"}
    table = pq.read_table(output).to_pydict()
    assert table["index"] == [*range(359)]
    assert [*map(int, table["label"])] == bundled_digits()[1].labels.tolist()
    assert np.mean(np.equal(table["label"], table["prediction"])) == metrics["eval/accuracy"]
    probabilities = [table[f"probability_{digit}"] for digit in range(10)]
    assert [str(digit) for digit in np.argmax(probabilities, 0)] == table["prediction"]


def test_all_mistakes_at_once(tool: Tool, run: Run, tmp_path: Path) -> None:
    refused = tool(run.folder, "--task.source=digts", "--task.sorce", "digits", "--seed", "3", "--shift=2", "bla")
    assert refused.exit_code == 2
    assert refused.stderr.splitlines() == [
        "evaluate: bla: not understood; settings are written --name=value",
        "evaluate: --seed=3: only settings of the task that choose the data can be changed here",
        "evaluate: --shift=2: only settings of the task that choose the data can be changed here",
        "evaluate: --task.source=digts: must be 'mnist' or 'digits'",
        "evaluate: --task.sorce=digits: unknown setting, did you mean task.source?",
    ]
    (output := tmp_path / "predictions.parquet").touch()
    assert tool(run.folder, f"--output={output}").stderr.startswith(f"evaluate: {output}: already exists; ")
    (link := output.with_name("link")).symlink_to("nowhere")  # a file that another user may have chosen
    assert tool(run.folder, f"--output={link}").stderr.startswith(f"evaluate: {link}: already exists; ")


def test_what_is_no_model_or_checkpoint_is_one_line(tool: Tool, checkpoints: Tool, tmp_path: Path) -> None:
    says = "neither a run's output folder, nor a model, nor a checkpoint"
    assert tool(tmp_path / "nothing").stderr == f"evaluate: {tmp_path}/nothing: {says}\n"
    says = "checkpoint: nowhere: neither a checkpoint nor a folder with checkpoints\n"
    assert checkpoints("list", "nowhere").stderr == says


@pytest.fixture
def checkpoints(capfd: pytest.CaptureFixture[str]) -> Tool:
    return Tool("checkpoint", checkpoints_main, capfd)


@pytest.fixture
def copied(whole: Whole, tmp_path: Path) -> Run:
    """With checkpoints of steps 4, 8, 12 and 14."""
    return Run(0, "", "", Path(shutil.copytree(whole("ddp", *ALL).folder, tmp_path / "run")))


def test_list_of_checkpoints(launch: Launch, copied: Run) -> None:
    done = launch("cpu", "list", str(copied.folder), script="src/tools/checkpoints.py").succeeded()
    assert done.stderr == ""
    listed = re.split(r"\n(?! )", done.stdout)
    for step, about in zip((14, 12, 8, 4), listed[:4], strict=True):
        assert re.match(rf"\S*/step_{step:08d} .*14.[45] MB.*ddp x 2$", about.splitlines()[0])
    assert f"\n  eval/loss {copied.summary['eval/loss']:.4f}  eval/accuracy " in listed[0]
    assert "eval" not in listed[1]


def test_verify_of_checkpoints(checkpoints: Tool, copied: Run, tmp_path: Path) -> None:
    assert "DAMAGED" not in checkpoints("verify", copied.folder).succeeded().stdout
    copy = shutil.copytree(copied.folder / "checkpoints/step_00000014", tmp_path / "step_00000014")
    shard = copy / "shard-00002-model-00001-of-00001.safetensors"
    shard.write_bytes(shard.read_bytes()[:-1] + b"!")
    assert checkpoints("list", copy).exit_code == 0
    found = checkpoints("verify", copy)
    assert (found.exit_code, found.stdout) == (1, f"{copy}  DAMAGED: {shard.name} has changed since it was saved\n")


def test_export_is_what_the_run_exported(checkpoints: Tool, copied: Run, tmp_path: Path) -> None:
    folder = copied.folder / "model_step_00000014"
    assert checkpoints("export", copied.folder).succeeded().stdout == f"{folder}\n"
    for name in ("model.safetensors", "README.md"):
        assert (folder / name).read_bytes() == (copied.folder / "model" / name).read_bytes()
    again = checkpoints("export", copied.folder)
    assert (again.exit_code, again.stderr) == (2, f"checkpoint: {folder}: already exists; choose another folder\n")
    checkpoints("export", copied.folder / "checkpoints/step_00000012", f"--output={tmp_path}/older").succeeded()
    older = tmp_path / "older/model.safetensors"
    assert older.read_bytes() != (folder / older.name).read_bytes()
