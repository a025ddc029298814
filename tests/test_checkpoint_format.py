"""A checkpoint of another format is refused in one line, and stays; what is said of each comes from its state; and
which process saves which tensor."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from torch import nn

from src.checkpoint.store import best_first
from src.checkpoint.tensors import rank_state_dict, run_tensors
from src.config.groups import Checkpoint
from src.training.state import FORMAT_VERSION
from tests.faults.runs import ALL, contents, cut_back, refusal, relist
from tests.launching import Whole


@pytest.fixture
def run(whole: Whole, tmp_path: Path) -> Path:
    return cut_back(whole("cpu", *ALL), tmp_path / "run", 8, 12)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda state: state.update(format_version=FORMAT_VERSION + 1), f"format version {FORMAT_VERSION + 1}, but"),
        (lambda state: state["progress"].update(mood=1), "with other fields (progress.mood), but"),
    ],
)
def test_another_format_is_one_line(run: Path, change: Callable[[dict[str, Any]], object], says: str) -> None:
    """Nor is the one before gone on from, which would have the newer one's place. Tried without: a TypeError of
    RunState or Progress; with taking it for damaged: it is renamed, and the run goes on from step 8."""
    checkpoint = run / "checkpoints" / "step_00000012"
    state = json.loads((checkpoint / "state.json").read_text())
    change(state)
    (checkpoint / "state.json").write_text(json.dumps(state))
    relist(checkpoint, "state.json")
    before = contents(run)
    (line,) = refusal(run)
    assert line.startswith(f"{checkpoint} has format version ")
    assert says in line
    assert line.endswith(f"this code reads version {FORMAT_VERSION}: use the code that saved it, or begin a new run")
    assert contents(run) == before


def test_the_best_are_chosen_by_the_evaluations_of_the_run() -> None:
    """Of equal ones the newest, NaN last, and none that wasn't evaluated."""
    newest_first = [Path(f"step_{step:08d}") for step in (60, 50, 40, 30, 20, 10)]
    evaluations = {10: {"eval/loss": 1.0}, 20: {"eval/loss": float("nan")}, 30: {"eval/loss": 0.5}, 40: {"eval/x": 1.0}}
    evaluations |= {50: {"eval/loss": 0.5}, 70: {"eval/loss": 0.1}}
    for mode, steps in ((None, [50, 30, 10, 20]), ("max", [10, 50, 30, 20])):
        best = best_first(newest_first, Checkpoint(mode=mode), evaluations)
        assert [int(path.name.removeprefix("step_")) for path in best] == steps


def test_each_tensor_is_saved_by_one_process_and_buffers_by_the_first() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
    tensors = run_tensors(model, [])
    shares = [set(rank_state_dict(tensors, rank, 3)) for rank in range(3)]
    assert set.union(*shares) == set(tensors)
    assert sum(map(len, shares)) == len(tensors)
    assert {f"model.{name}" for name, _ in model.named_buffers()} <= shares[0]
