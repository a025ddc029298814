"""A run resumes only from an intact checkpoint of its own format, settings, model and log; all else is refused."""

import contextlib
import dataclasses
import json
import math
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from src.checkpoint.compatibility import note_changes, read_state, require_full_log
from src.checkpoint.integrity import problems
from src.checkpoint.store import Store
from src.checkpoint.tensors import load_tensors
from src.config.config import config_from
from src.config.errors import UserError
from src.tasks import TASKS
from src.tasks.mnist import MnistCnn
from src.tracking import tracker as tracking
from src.tracking.records import read_records
from src.training.progress import Progress
from src.training.state import FORMAT_VERSION
from tests.faults.runs import ALL, TINY, assert_same_run, checkpoints, contents, cut_back, refusal, relist
from tests.launching import Launch, Whole
from train import run_settings

SHARD, OTHER = (f"shard-0000{number}-model-00001-of-00001.safetensors" for number in (1, 2))
Damage = Callable[[Path], object]


@pytest.fixture
def run(whole: Whole, tmp_path: Path) -> Path:
    """The folder of a run that was killed, with checkpoints of steps 8 and 12."""
    return cut_back(whole("ddp", *ALL), tmp_path / "run", 8, 12)


def rewrite(name: str, change: Callable[[bytes], bytes]) -> Damage:
    return lambda checkpoint: (checkpoint / name).write_bytes(change((checkpoint / name).read_bytes()))


def flip_a_bit(data: bytes) -> bytes:
    return data[:-1000] + bytes([data[-1000] ^ 1]) + data[-999:]


def half(data: bytes) -> bytes:
    return data[: len(data) // 2]


def remove(name: str) -> Damage:
    return lambda checkpoint: (checkpoint / name).unlink()


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (rewrite(SHARD, half), "bytes, not"),
        (rewrite(SHARD, flip_a_bit), "has changed since it was saved"),
        (remove(SHARD), "is missing"),
        (remove("rng_00001.json"), "rng_00001.json is missing"),
        (lambda step: shutil.copy(step / OTHER, step / SHARD), "bytes, not"),
        (lambda step: shutil.copy(step.parent / "step_00000008" / SHARD, step), "has changed since it was saved"),
        # DCP reads every shard in the folder
        (lambda step: shutil.copy(step / SHARD, step / SHARD.replace("1", "3", 1)), "is an unexpected file"),
        (remove("manifest.json"), "manifest.json is missing"),
        (rewrite("manifest.json", half), "manifest.json is damaged"),
        (rewrite("state.json", lambda data: data.replace(b'"step": 12', b'"step": 11')), "state.json has changed"),
        # a stranger's manifest must not make us read files elsewhere
        (rewrite("manifest.json", lambda data: data.replace(b"state.json", b"../step_00000008/state.json")),
         "state.json is an unexpected file"),
    ],
)  # fmt: skip
def test_each_damage_to_a_checkpoint_is_found(run: Path, damage: Damage, says: str) -> None:
    """Each of three processes looks at a part of the files; together they find what one would."""
    checkpoint = run / "checkpoints" / "step_00000012"
    assert list(problems(checkpoint)) == []
    damage(checkpoint)
    assert says in "; ".join(problems(checkpoint))
    shares = [problem for rank in range(3) for problem in problems(checkpoint, shard=(rank, 3))]
    assert set(shares) == set(problems(checkpoint))


def test_a_damaged_checkpoint_is_set_aside_and_the_one_before_resumed(launch: Launch, run: Path, whole: Whole) -> None:
    rewrite(SHARD, flip_a_bit)(run / "checkpoints" / "step_00000012")
    again = launch("ddp", *TINY, "--checkpoint.keep_last=3", folder=run).succeeded()
    assert f"skipped and set aside: {run}/checkpoints/step_00000012, {SHARD} has changed" in again.stdout
    assert "after step 8, from" in again.stdout
    assert_same_run(again, whole("ddp", *ALL))
    assert checkpoints(run) == [8, 12, 14]
    assert len(list(run.glob("checkpoints/damaged_1_step_00000012"))) == 1


def swap_names(run: Path) -> None:
    older, newer = (run / "checkpoints" / f"step_{step:08d}" for step in (8, 12))
    older.rename(run / "older")
    newer.rename(older)
    (run / "older").rename(newer)


def save_as_another_format(run: Path) -> None:
    checkpoint = run / "checkpoints" / "step_00000012"
    state = json.loads((checkpoint / "state.json").read_text()) | {"format_version": FORMAT_VERSION + 1}
    (checkpoint / "state.json").write_text(json.dumps(state))
    relist(checkpoint, "state.json")


CHANGED = ("--optim.lr=0.001", "--global_batch_size=8", "--micro_batch_size=4", "--epochs=11")
"""Changed settings, of which epochs need not be set back."""
REFUSED: dict[str, tuple[Damage, tuple[str, ...], list[str]]] = {
    "swapped names": (swap_names, (), [
        "{run}/checkpoints/step_00000012: state.json is of step 8: rename the folder back",
        "{run}/checkpoints/step_00000008: state.json is of step 12: rename the folder back"]),
    "no intact checkpoint": (lambda run: [rewrite(SHARD, half)(each) for each in run.glob("checkpoints/*")], (), [
        "no valid checkpoint to resume from"]),
    "a shortened log": (rewrite("metrics.jsonl", lambda data: data[:100]), (), [
        "{run}/metrics.jsonl has 100 bytes, but had "]),
    "another format version": (save_as_another_format, (), [
        f"{{run}}/checkpoints/step_00000012 has format version {FORMAT_VERSION + 1}, but this code reads version "
        f"{FORMAT_VERSION}: use the code that saved it, or begin a new run"]),
    "changed settings": (lambda _: None, CHANGED, [
        ": global_batch_size 16 -> 8, optim.lr 0.003 -> 0.001; set them back"]),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_resumed_is_refused_and_left_unchanged(run: Path, case: str) -> None:
    change, arguments, expected = REFUSED[case]
    change(run)
    before = contents(run)
    message = "\n".join(refusal(run, *arguments))
    assert [line for line in expected if line.format(run=run) not in message] == [], message
    assert contents(run) == before


def test_a_checkpoint_of_another_model_is_refused(run: Path) -> None:
    wider = MnistCnn()
    wider.fc2 = torch.nn.Linear(128, 11)
    message = r"fit this model: fc2.weight has shape \(10, 128\) in the checkpoint and has shape \(11, 128\) here, fc2"
    with pytest.raises(ValueError, match=message):
        load_tensors(run / "checkpoints" / "step_00000012", wider)


def test_an_unreadable_checkpoint_is_not_taken_for_damaged(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It may be intact, and another user's. Root reads everything, so the file system is a fake."""
    refused = PermissionError(13, "Permission denied", "state.json")
    monkeypatch.setattr(Path, "read_bytes", Mock(side_effect=refused))
    with pytest.raises(ValueError, match="cannot be read, Permission denied: ask for permission to read it"):
        list(problems(run / "checkpoints" / "step_00000012"))


@pytest.mark.parametrize(
    ("then", "now", "is_refused"),
    [
        ({"max_steps": 1000}, {"max_steps": 950}, True),  # an epoch has 90 steps, so 10 of them 900
        ({"max_steps": 200}, {"max_steps": 100}, False),
        ({"max_steps": 901}, {"max_steps": None}, True),
        ({"epochs": 10, "max_steps": 100}, {"epochs": 9, "max_steps": 100}, True),
    ],
)
def test_a_shorter_schedule_is_refused(whole: Whole, then: Any, now: Any, is_refused: bool) -> None:
    """The schedule spans the epochs, or max_steps if these are more."""
    origin = read_state(whole("cpu", *ALL).folder / "checkpoints" / "step_00000012").origin
    steps = config_from(origin.settings | then, TASKS).schedule_steps(origin.examples)
    saved = dataclasses.replace(origin, settings=origin.settings | then, schedule_steps=steps)
    refusal = pytest.raises(UserError, match="the learning-rate schedule then spans [89][0-9]+ steps, not ")
    with refusal if is_refused else contextlib.nullcontext():
        note_changes(config_from(origin.settings | now, TASKS), Path("step_00000012"), saved)


def test_changed_settings_are_accepted_on_request(launch: Launch, whole: Whole) -> None:
    origin = whole("cpu", *ALL).folder / "checkpoints/step_00000012"
    branch = launch("cpu", *TINY, *CHANGED, f"--resume={origin}", "--checkpoint.accept_changes=true").succeeded()
    assert "changed since: epochs 10 -> 11, global_batch_size 16 -> 8, optim.lr 0.003 -> 0.001" in branch.stdout
    assert [record["step"] for record in branch.records if "train/loss" in record] == [13, 14]


@pytest.mark.parametrize(("mode", "steps"), [("null", [50, 30, 10, 20]), ("max", [10, 50, 30, 20])])
def test_the_best_checkpoints_have_the_best_evaluations(mode: str, steps: list[int]) -> None:
    """Of equal ones the newest is the best, NaN is the worst, and what was not evaluated does not count."""
    newest_first = [Path(f"step_{step:08d}") for step in (60, 50, 40, 30, 20, 10)]
    losses = {10: 1.0, 20: math.nan, 30: 0.5, 50: 0.5, 70: 0.1}
    evaluations: Any = {step: {"eval/loss": loss} for step, loss in losses.items()} | {40: {"eval/x": 1.0}}
    best = Store(Mock(), run_settings([f"--checkpoint.mode={mode}"])).best_first(newest_first, evaluations)
    assert [int(path.name.removeprefix("step_")) for path in best] == steps


def test_damaged_lines_of_a_log_are_skipped_and_no_others(tmp_path: Path) -> None:
    """Each kind of damage is between two records; a kill cut the last line short."""
    records = [{"step": 10, "train/loss": 1.0}, {"step": 20, "train/loss": None, "eval/mistakes": [{"label": "3"}]}]
    damaged = [b'{"step": 5, "train/loss": 1', b"\0" * 90, b"\xff\xfe", b"5", b'{"train/loss": 9}', b"[" * 10**5, b""]
    first, last = (json.dumps(record).encode() for record in records)
    file = tmp_path / "metrics.jsonl"
    file.write_bytes(b"\n".join([first, *damaged, last, b'{"step": 30, "tra']))
    assert list(read_records(file)) == records
    assert list(read_records(tmp_path / "absent")) == []


def test_resuming_does_not_read_the_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It has 2**40 bytes here, more than any memory. What was logged after the checkpoint is cut off."""
    config, log = run_settings([f"--output_dir={tmp_path}"]), tmp_path / "metrics.jsonl"
    log.touch()
    os.truncate(log, 2**40)
    state = Mock(metrics_bytes=2**40 - 1, run_id=None)
    require_full_log(config, tmp_path, state)
    monkeypatch.setattr(tracking, "print_summary", Mock())
    resume = Mock(checkpoint=tmp_path, own_state=lambda _: state)
    run: Any = Mock(config=config, resume=resume, progress=Progress(step=10), total_steps=20)
    with tracking.Tracker(run, Mock(where={})) as tracker:
        assert tracker.sync() == log.stat().st_size == state.metrics_bytes
    state.metrics_bytes = 2**40
    with pytest.raises(UserError, match="restore it"):
        require_full_log(config, tmp_path, state)
