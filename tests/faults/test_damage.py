"""Checkpoints that were damaged after they were saved: found out, passed over with the reason, never loaded."""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from src.checkpoint.integrity import problems
from src.checkpoint.tensors import load_tensors
from src.tasks.mnist import MnistCnn
from tests.faults.runs import ALL, TINY, assert_same_run, checkpoints, cut_back, refusal
from tests.launching import Launch, Whole

SHARD, OTHER = (f"shard-0000{number}-model-00001-of-00001.safetensors" for number in (1, 2))


@pytest.fixture
def run(whole: Whole, tmp_path: Path) -> Path:
    """Killed with checkpoints of steps 8 and 12."""
    return cut_back(whole("ddp", *ALL), tmp_path / "run", 8, 12)


def rewrite(name: str, change: Callable[[bytes], bytes]) -> Callable[[Path], object]:
    return lambda checkpoint: (checkpoint / name).write_bytes(change((checkpoint / name).read_bytes()))


def flip_a_bit(data: bytes) -> bytes:
    return data[:-1000] + bytes([data[-1000] ^ 1]) + data[-999:]


def half(data: bytes) -> bytes:
    return data[: len(data) // 2]


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (rewrite(SHARD, half), "bytes, not"),
        (rewrite(SHARD, flip_a_bit), "has changed since it was saved"),
        (lambda step: (step / SHARD).unlink(), "is missing"),
        (lambda step: shutil.copy(step / OTHER, step / SHARD), "bytes, not"),
        # from an older checkpoint
        (lambda step: shutil.copy(step.parent / "step_00000008" / SHARD, step), "has changed since it was saved"),
        # DCP reads every shard that lies in the folder
        (lambda step: shutil.copy(step / SHARD, step / SHARD.replace("1", "3", 1)), "is an unexpected file"),
        (lambda step: (step / "manifest.json").unlink(), "manifest.json is missing"),
        (rewrite("manifest.json", half), "manifest.json is damaged"),
        (rewrite("state.json", lambda data: data.replace(b'"step": 12', b'"step": 11')), "state.json has changed"),
        # a manifest from someone else must not make us read files elsewhere
        (rewrite("manifest.json", lambda data: data.replace(b"state.json", b"../step_00000008/state.json")),
         "state.json is not in the manifest"),
    ],
)  # fmt: skip
def test_each_damage_is_found(run: Path, damage: Callable[[Path], object], says: str) -> None:
    """Tried without: comparing sizes, checksums, the list of files; each lets some pass."""
    checkpoint = run / "checkpoints" / "step_00000012"
    assert list(problems(checkpoint)) == []
    damage(checkpoint)
    assert says in "; ".join(problems(checkpoint))
    shares = [problem for rank in range(3) for problem in problems(checkpoint, shard=(rank, 3))]
    assert set(shares) == set(problems(checkpoint))


def test_checkpoints_whose_names_were_swapped_are_not_taken_for_each_other(run: Path) -> None:
    """Tried without comparing the name with the state: the run goes on from step 8, as if it were 12."""
    older, newer = (run / "checkpoints" / f"step_{step:08d}" for step in (8, 12))
    older.rename(run / "older")
    newer.rename(older)
    (run / "older").rename(newer)
    own_name = "rename the folder back"
    assert refusal(run)[:2] == [
        f"{newer}: state.json is of step 8: {own_name}",
        f"{older}: state.json is of step 12: {own_name}",
    ]
    assert checkpoints(run) == [8, 12]
    copy = older.rename(run / "the last one")  # any other name will do
    assert list(problems(copy)) == []


def test_the_newest_whole_one_is_taken_and_the_reason_said(launch: Launch, run: Path, whole: Whole) -> None:
    """Tried without setting aside: the next save at that step fails."""
    rewrite(SHARD, flip_a_bit)(run / "checkpoints" / "step_00000012")
    again = launch("ddp", *TINY, "--checkpoint.keep_last=3", folder=run).succeeded()
    assert f"skipped and set aside: {run}/checkpoints/step_00000012, {SHARD} has changed" in again.stdout
    assert "after step 8, from" in again.stdout
    assert_same_run(again, whole("ddp", *ALL))
    assert checkpoints(run) == [8, 12, 14]
    assert len(list(run.glob("checkpoints/damaged_1_step_00000012"))) == 1


def test_with_none_whole_nothing_is_started_over(run: Path) -> None:
    """Tried without raising: it trains from the start, over the record."""
    for checkpoint in (run / "checkpoints").iterdir():
        rewrite(SHARD, half)(checkpoint)
    lines = refusal(run)
    assert len(lines) == 3
    assert "no valid checkpoint to resume from" in lines[-1]
    assert checkpoints(run) == [8, 12]


def test_a_checkpoint_of_another_model_is_refused(run: Path) -> None:
    """Tried without comparing names and shapes."""
    wider = MnistCnn()
    wider.fc2 = torch.nn.Linear(128, 11)
    message = r"another model: fc2.weight is \(10, 128\) in it and \(11, 128\) here, and 1 more differ"
    with pytest.raises(ValueError, match=message):
        load_tensors(run / "checkpoints" / "step_00000012", wider)


def test_one_that_may_not_be_read_is_not_set_aside(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another user's may be whole. Tried without: it is renamed, and the run goes on from the one before."""
    checkpoint = run / "checkpoints" / "step_00000012"

    def refuse(path: Path) -> bytes:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(Path, "read_bytes", refuse)
    with pytest.raises(ValueError, match="cannot be read, Permission denied: ask for permission to read it"):
        list(problems(checkpoint))
