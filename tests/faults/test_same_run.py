"""A run goes on from a checkpoint of the same run alone: of the same settings, the same data and the whole record."""

import contextlib
import dataclasses
import json
import math
from pathlib import Path

import pytest

from src.checkpoint import files
from src.checkpoint.compatibility import note_changes, require_same_data
from src.config.config import config_from
from src.config.errors import UserError
from src.tasks import TASKS
from src.training.state import Origin
from tests.faults.runs import ALL, ORIGIN, TINY, contents, cut_back, refusal
from tests.launching import WANDB, Launch, Whole


def test_a_record_that_was_cut_is_not_written_on(whole: Whole, tmp_path: Path) -> None:
    """Tried without: the run goes on, with a part of its record."""
    folder = cut_back(whole("cpu", *ALL), tmp_path / "run", 12)
    record = folder / "metrics.jsonl"
    text = record.read_text()
    record.write_text(text[:100])
    assert refusal(folder)[0].startswith(f"{record} has 100 bytes, but had ")
    assert record.read_text() == text[:100]


def test_a_shorter_schedule_is_another_run(whole: Whole) -> None:
    """Where the steps asked for are more than those of the epochs, they are what the schedule spans."""
    origin = files.read_state(whole("cpu", *ALL).folder / "checkpoints" / "step_00000012").origin
    for then, now, is_refused in (
        ({"max_steps": 1000}, {"max_steps": 950}, True),  # an epoch has 90 steps, so 10 of them 900
        ({"max_steps": 200}, {"max_steps": 100}, False),
        ({"max_steps": None}, {"max_steps": 901}, False),
        ({"max_steps": 901}, {"max_steps": None}, True),
        ({"epochs": 10, "max_steps": 100}, {"epochs": 9, "max_steps": 100}, True),
        ({"epochs": 9, "max_steps": 1000}, {"epochs": 10, "max_steps": 1000}, False),
    ):
        before = config_from(origin.settings | then, TASKS)
        steps = before.schedule_steps(origin.examples)
        saved = dataclasses.replace(origin, settings=origin.settings | then, schedule_steps=steps)
        refusal = pytest.raises(UserError, match="the learning-rate schedule then spans [89][0-9]+ steps, not ")
        with refusal if is_refused else contextlib.nullcontext():
            note_changes(config_from(origin.settings | now, TASKS), Path("step_00000012"), saved)


def test_changed_settings_are_refused_unless_asked_for(launch: Launch, whole: Whole, tmp_path: Path) -> None:
    """And nothing is touched. Tried without refusing: it trains on."""
    folder = cut_back(whole("cpu", *ALL), tmp_path / "run", 12)
    free = ("--wandb.tags=[x]",) if WANDB else ()
    changed = ("--optim.lr=0.001", "--global_batch_size=8", "--micro_batch_size=4", "--epochs=11", *free)
    before = contents(folder)
    (line,) = refusal(folder, *changed)
    assert ": global_batch_size 16 -> 8, optim.lr 0.003 -> 0.001; set them back" in line  # epochs need not be
    assert contents(folder) == before
    branch = (*TINY, *changed, f"--resume={folder}/checkpoints/step_00000012", "--checkpoint.accept_changes=true")
    asked = launch("cpu", *branch).succeeded()
    assert "changed since: epochs 10 -> 11, global_batch_size 16 -> 8, optim.lr 0.003 -> 0.001" in asked.stdout
    assert [record["step"] for record in asked.records if "train/loss" in record] == [13, 14]


def test_a_value_that_is_no_number_is_the_same_after_a_checkpoint(tmp_path: Path) -> None:
    """Such as the mean of an empty column, in what a task keeps of its data. Tried without: NaN differs from NaN."""
    now = dataclasses.replace(ORIGIN, data_state={"mean": {"a": math.nan, "b": 1.0}})
    then = Origin(**json.loads(json.dumps(dataclasses.asdict(now))))
    require_same_data(tmp_path, then, now)
    changed = dataclasses.replace(now, data_state={"mean": {"a": math.nan, "b": 2.0}})
    with pytest.raises(UserError, match="mean"):
        require_same_data(tmp_path, then, changed)
