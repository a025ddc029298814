"""Checkpoints that were damaged after they were saved: found out, passed over with the reason, never loaded."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from src.checkpoint import format
from src.checkpoint.tensors import load_tensors
from src.models.mnist_cnn import MnistCnn
from tests.faults.runs import EACH_STEP, SHORT, assert_same_run, checkpoints, cut_back
from tests.launching import Launch, Whole

SHARD = "shard-00001-model-00001-of-00001.safetensors"


@pytest.fixture
def run(whole: Whole, tmp_path: Path) -> Path:
    """Killed with checkpoints of steps 22 and 24."""
    return cut_back(whole("ddp", *EACH_STEP), tmp_path / "run", 22, 24)


def truncate(checkpoint: Path) -> None:
    data = (checkpoint / SHARD).read_bytes()
    (checkpoint / SHARD).write_bytes(data[: len(data) // 2])


def flip_a_bit(checkpoint: Path) -> None:
    data = bytearray((checkpoint / SHARD).read_bytes())
    data[-1000] ^= 1
    (checkpoint / SHARD).write_bytes(data)


def remove(checkpoint: Path) -> None:
    (checkpoint / SHARD).unlink()


def swap(checkpoint: Path) -> None:
    """Two files, each in the other's place."""
    other = SHARD.replace("00001", "00002", 1)
    data = [(checkpoint / name).read_bytes() for name in (SHARD, other)]
    (checkpoint / SHARD).write_bytes(data[1])
    (checkpoint / other).write_bytes(data[0])


def take_an_older_one(checkpoint: Path) -> None:
    shutil.copy(checkpoint.parent / "step_00000022" / SHARD, checkpoint / SHARD)


def add(checkpoint: Path) -> None:
    """DCP reads every shard that lies in the folder."""
    shutil.copy(checkpoint / SHARD, checkpoint / "shard-00003-model-00001-of-00001.safetensors")


def lose_the_manifest(checkpoint: Path) -> None:
    (checkpoint / "manifest.json").unlink()


def cut_the_manifest(checkpoint: Path) -> None:
    text = (checkpoint / "manifest.json").read_text()
    (checkpoint / "manifest.json").write_text(text[: len(text) // 2])


def change_the_state(checkpoint: Path) -> None:
    text = (checkpoint / "state.json").read_text()
    (checkpoint / "state.json").write_text(text.replace('"step": 24', '"step": 23'))


def point_elsewhere(checkpoint: Path) -> None:
    """A manifest from someone else must not make us read files elsewhere."""
    manifest = json.loads((checkpoint / "manifest.json").read_text())
    manifest["files"]["../step_00000022/state.json"] = manifest["files"].pop("state.json")
    (checkpoint / "manifest.json").write_text(json.dumps(manifest))


DAMAGES: dict[Callable[[Path], None], str] = {
    truncate: "bytes, not",
    flip_a_bit: "has changed since it was saved",
    remove: "is missing",
    swap: "bytes, not",
    take_an_older_one: "has changed since it was saved",
    add: "does not belong to it",
    lose_the_manifest: "manifest.json is missing",
    cut_the_manifest: "manifest.json is damaged",
    change_the_state: "state.json has changed",
    point_elsewhere: "state.json is not in the manifest",
}


@pytest.mark.parametrize("damage", DAMAGES, ids=lambda damage: damage.__name__)
def test_each_damage_is_found(run: Path, damage: Callable[[Path], None]) -> None:
    """Tried without: comparing sizes, checksums, the list of files; each lets some pass."""
    checkpoint = run / "checkpoints" / "step_00000024"
    assert list(format.problems(checkpoint)) == []
    damage(checkpoint)
    assert DAMAGES[damage] in "; ".join(format.problems(checkpoint))
    shares = [problem for rank in range(3) for problem in format.problems(checkpoint, share=(rank, 3))]
    assert set(shares) == set(format.problems(checkpoint))


def test_the_newest_whole_one_is_taken_and_the_reason_said(launch: Launch, run: Path, whole: Whole) -> None:
    """Tried without setting aside: the next save at that step fails."""
    flip_a_bit(run / "checkpoints" / "step_00000024")
    again = launch("ddp", *SHORT, "--checkpoint.keep_last=3", folder=run).succeeded()
    assert f"passed over and set aside: {run}/checkpoints/step_00000024, {SHARD} has changed" in again.stdout
    assert "after step 22, from" in again.stdout
    assert_same_run(again, whole("ddp", *EACH_STEP))
    assert checkpoints(run) == [22, 24, 30]
    assert len(list(run.glob("checkpoints/damaged_1_step_00000024"))) == 1


def test_with_none_whole_nothing_is_started_over(launch: Launch, run: Path) -> None:
    """Tried without raising: it trains from the start, over the record."""
    for checkpoint in (run / "checkpoints").iterdir():
        truncate(checkpoint)
    refused = launch("cpu", *SHORT, folder=run)
    assert refused.exit_code != 0
    assert len(refused.messages) == 3
    assert "no valid checkpoint to continue from" in refused.messages[-1]
    assert checkpoints(run) == [22, 24]


def test_a_checkpoint_of_another_model_is_refused(run: Path) -> None:
    """Tried without comparing names and shapes."""
    wider = MnistCnn()
    wider.fc2 = torch.nn.Linear(128, 11)
    message = r"another model: fc2.weight is \(10, 128\) in it and \(11, 128\) in this one, and 1 more differ"
    with pytest.raises(ValueError, match=message):
        load_tensors(run / "checkpoints" / "step_00000024", wider)


def test_one_that_may_not_be_read_is_not_set_aside(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another user's may be whole. Tried without: it is renamed, and the run goes on from the one before."""
    checkpoint = run / "checkpoints" / "step_00000024"

    def refuse(path: Path) -> str:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(Path, "read_text", refuse)
    with pytest.raises(ValueError, match="cannot be read, Permission denied: have it made readable for you"):
        list(format.problems(checkpoint))
