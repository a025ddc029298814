"""python -m src.tools.evaluate: metrics, predictions, and a task of one's own."""

import json
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest

from src.tasks.mnist import bundled_digits
from src.tools.evaluate import main
from tests.faults.runs import ALL
from tests.launching import Run, Tool, Whole


@pytest.fixture
def tool(capsys: pytest.CaptureFixture[str]) -> Tool:
    return Tool("evaluate", main, capsys)


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
    refused = tool(run.folder, "--task.source=digts", "--task.sorce=digits", "--seed=3", "--bla")
    assert refused.exit_code == 2
    assert refused.stderr.splitlines() == [
        "evaluate: --bla: not understood; settings are written --name=value",
        "evaluate: --seed=3: only settings of the task that choose the data can be changed here",
        "evaluate: --task.source=digts: must be 'mnist' or 'digits'",
        "evaluate: --task.sorce=digits: unknown setting, did you mean task.source?",
    ]
    (output := tmp_path / "predictions.parquet").touch()
    assert tool(run.folder, f"--output={output}").stderr.startswith(f"evaluate: {output}: already exists; ")


def test_what_is_no_model_is_one_line(tool: Tool, tmp_path: Path) -> None:
    says = "neither a run's output folder, nor a model, nor a checkpoint"
    assert tool(tmp_path / "nothing").stderr == f"evaluate: {tmp_path}/nothing: {says}\n"
