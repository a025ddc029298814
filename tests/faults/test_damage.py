"""A run is resumed from a checkpoint that is whole, of this format and of the same run; what is not is never loaded."""

import contextlib
import dataclasses
import json
import math
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from src.checkpoint.compatibility import note_changes, read_state, require_full_log, require_same_data
from src.checkpoint.integrity import problems
from src.checkpoint.store import Store
from src.checkpoint.tensors import load_tensors
from src.config.config import config_from
from src.config.errors import UserError
from src.tasks import TASKS
from src.tasks.mnist import Mnist, MnistCnn
from src.tracking import tracker as tracking
from src.tracking.records import read_records
from src.training.progress import Progress
from src.training.state import FORMAT_VERSION, RunInputs
from tests.faults.runs import ALL, ORIGIN, TINY, assert_same_run, checkpoints, contents, cut_back, refusal, relist
from tests.launching import Launch, Whole
from train import run_settings

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
        # tried without: the run resumes with other dropout
        (lambda step: (step / "rng_00001.json").unlink(), "rng_00001.json is missing"),
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
         "state.json is an unexpected file"),
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


def test_the_newest_whole_one_is_taken_and_the_reason_said(launch: Launch, run: Path, whole: Whole) -> None:
    """Tried without setting aside: the next save at that step fails."""
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


def state_with(change: Callable[[dict[str, Any]], object]) -> Callable[[Path], None]:
    """Change the newest checkpoint's state, as if it had been saved so."""

    def damage(run: Path) -> None:
        checkpoint = run / "checkpoints" / "step_00000012"
        state = json.loads((checkpoint / "state.json").read_text())
        change(state)
        (checkpoint / "state.json").write_text(json.dumps(state))
        relist(checkpoint, "state.json")

    return damage


CHANGED: tuple[str, ...] = ("--optim.lr=0.001", "--global_batch_size=8", "--micro_batch_size=4", "--epochs=11")
CHANGED += ("--wandb.tags=[x]",)  # room: wandb
USE = f", but this code reads version {FORMAT_VERSION}: use the code that saved it, or begin a new run"
REFUSED: dict[str, tuple[Callable[[Path], object], tuple[str, ...], list[str]]] = {
    # tried without comparing the name with the state: it goes on from step 8, as if it were 12
    "names that were swapped": (swap_names, (), [
        "{run}/checkpoints/step_00000012: state.json is of step 8: rename the folder back",
        "{run}/checkpoints/step_00000008: state.json is of step 12: rename the folder back"]),
    # tried without raising: it trains from the start, over the record
    "none that is whole": (lambda run: [rewrite(SHARD, half)(one) for one in run.glob("checkpoints/*")], (), [
        "no valid checkpoint to resume from"]),
    # tried without: a part of the record is gone
    "a record that was cut": (lambda run: rewrite("metrics.jsonl", lambda data: data[:100])(run), (), [
        "{run}/metrics.jsonl has 100 bytes, but had "]),
    # tried without: a TypeError; taken for damaged: it is renamed, and the run goes on from step 8
    "another format": (state_with(lambda state: state.update(format_version=FORMAT_VERSION + 1)), (), [
        f"{{run}}/checkpoints/step_00000012 has format version {FORMAT_VERSION + 1}{USE}"]),
    # epochs need not be set back; tried without: it trains on
    "changed settings": (str, CHANGED, [": global_batch_size 16 -> 8, optim.lr 0.003 -> 0.001; set them back"]),
}  # fmt: skip


@pytest.mark.parametrize("what", REFUSED)
def test_what_cannot_be_resumed_is_refused_and_left_as_it_is(run: Path, what: str) -> None:
    change, arguments, says = REFUSED[what]
    change(run)
    before = contents(run)
    told = "\n".join(refusal(run, *arguments))
    assert [line for line in says if line.format(run=run) not in told] == [], told
    assert contents(run) == before


def test_a_checkpoint_of_another_model_is_refused(run: Path) -> None:
    """Tried without comparing names and shapes."""
    wider = MnistCnn()
    wider.fc2 = torch.nn.Linear(128, 11)
    message = r"fit this model: fc2.weight has shape \(10, 128\) in the checkpoint and has shape \(11, 128\) here, fc2"
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


def test_a_shorter_schedule_is_another_run(whole: Whole) -> None:
    """Where the steps asked for are more than those of the epochs, they are what the schedule spans."""
    origin = read_state(whole("cpu", *ALL).folder / "checkpoints" / "step_00000012").origin
    for then, now, is_refused in (
        ({"max_steps": 1000}, {"max_steps": 950}, True),  # an epoch has 90 steps, so 10 of them 900
        ({"max_steps": 200}, {"max_steps": 100}, False),
        ({"max_steps": None}, {"max_steps": 901}, False),
        ({"max_steps": 901}, {"max_steps": None}, True),
        ({"epochs": 10, "max_steps": 100}, {"epochs": 9, "max_steps": 100}, True),
    ):
        before = config_from(origin.settings | then, TASKS)
        steps = before.schedule_steps(origin.examples)
        saved = dataclasses.replace(origin, settings=origin.settings | then, schedule_steps=steps)
        refusal = pytest.raises(UserError, match="the learning-rate schedule then spans [89][0-9]+ steps, not ")
        with refusal if is_refused else contextlib.nullcontext():
            note_changes(config_from(origin.settings | now, TASKS), Path("step_00000012"), saved)


def test_changed_settings_are_taken_where_that_is_asked_for(launch: Launch, whole: Whole) -> None:
    origin = whole("cpu", *ALL).folder / "checkpoints/step_00000012"
    branch = (*TINY, *CHANGED, f"--resume={origin}", "--checkpoint.accept_changes=true")
    asked = launch("cpu", *branch).succeeded()
    assert "changed since: epochs 10 -> 11, global_batch_size 16 -> 8, optim.lr 0.003 -> 0.001" in asked.stdout
    assert [record["step"] for record in asked.records if "train/loss" in record] == [13, 14]


def test_a_value_that_is_no_number_is_the_same_after_a_checkpoint(tmp_path: Path) -> None:
    """Such as the mean of an empty column, in what a task keeps of its data. Tried without: NaN differs from NaN."""
    now = dataclasses.replace(ORIGIN, data_state={"mean": {"a": math.nan, "b": 1.0}})
    then = RunInputs(**json.loads(json.dumps(dataclasses.asdict(now))))
    require_same_data(tmp_path, then, now)
    changed = dataclasses.replace(now, data_state={"mean": {"a": math.nan, "b": 2.0}})
    with pytest.raises(UserError, match="mean"):
        require_same_data(tmp_path, then, changed)


def test_the_best_are_chosen_by_the_evaluations_of_the_run() -> None:
    """Of equal ones the newest, NaN last, and none that wasn't evaluated."""
    newest_first = [Path(f"step_{step:08d}") for step in (60, 50, 40, 30, 20, 10)]
    evaluations = {10: {"eval/loss": 1.0}, 20: {"eval/loss": float("nan")}, 30: {"eval/loss": 0.5}, 40: {"eval/x": 1.0}}
    evaluations |= {50: {"eval/loss": 0.5}, 70: {"eval/loss": 0.1}}
    for mode, steps in (("null", [50, 30, 10, 20]), ("max", [10, 50, 30, 20])):
        store = Store(Mock(), run_settings([f"--checkpoint.mode={mode}"]))
        best = store.best_first(newest_first, evaluations)
        assert [int(path.name.removeprefix("step_")) for path in best] == steps


RECORDS = [{"step": 10, "train/loss": 1.0}, {"step": 20, "train/loss": None, "eval/mistakes": [{"label": "3"}]}]
DAMAGED = [b'{"step": 5, "train/loss": 1', b"\0" * 90, b"\xff\xfe", b"5", b'{"train/loss": 9}', b"[" * 10**5, b""]


def test_a_damaged_line_is_left_out_and_none_beside_it(tmp_path: Path) -> None:  # room: report examples
    """With each kind of damage between two records, and cut short by a kill. Tried with json.loads: a traceback."""
    first, last = (json.dumps(record).encode() for record in RECORDS)
    file = tmp_path / "metrics.jsonl"
    file.write_bytes(b"\n".join([first, *DAMAGED, last, b'{"step": 30, "tra']))
    assert list(read_records(file)) == RECORDS
    assert list(read_records(tmp_path / "absent")) == []


def test_a_resume_takes_as_long_however_long_the_log_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Here 2**40 bytes, which no machine could read. Tried with reading all of it: a MemoryError."""
    last = b'\n{"step": 10, "train/loss": 1.0}\n'
    config = run_settings([f"--output_dir={tmp_path}"]).model_copy(update={"trackers": []})
    with (tmp_path / "metrics.jsonl").open("wb") as stream:
        stream.truncate(2**40)
        stream.seek(2**40)
        stream.write(last)
    state: Any = SimpleNamespace(metrics_bytes=2**40 + len(last), run_id=None)
    require_full_log(config, tmp_path / "step_00000010", state)
    start: Any = SimpleNamespace(checkpoint=tmp_path, is_own=lambda _: True, own_state=lambda _: state)
    of_the_run = {"progress": Progress(step=10), "launch": SimpleNamespace()}
    run: Any = SimpleNamespace(config=config, is_main=True, resume=start, total_steps=20, task=Mnist(), **of_the_run)
    monkeypatch.setattr(tracking, "print_summary", lambda *_: None)
    with tracking.Tracker(run, Mock(where={})) as tracker:
        assert tracker.sync() == state.metrics_bytes
    state.metrics_bytes += 1
    with pytest.raises(UserError, match="restore it"):
        require_full_log(config, tmp_path / "step_00000010", state)
