"""A run that was killed goes on exactly: losses, record and final weights are those of a run in one piece."""

import dataclasses
import itertools
import json
import math
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
import yaml

from src.checkpoint import format, occupied
from src.checkpoint.occupied import lock
from src.checkpoint.same_run import note_changes, require_same_data
from src.config.config import config_from
from src.config.errors import UserError
from src.tasks import TASKS
from src.training import batches
from tests.faults.runs import (
    EACH_STEP,
    SHORT,
    WORKER,
    assert_equal,
    assert_same_run,
    checkpoints,
    curve,
    cut_back,
    found,
    killed_and_resumed,
    refusal,
    weights,
)
from tests.launching import WANDB, Launch, Rounding, Started, Whole, mistakes, slow
from train import run_settings


def test_a_killed_cnn_goes_on_to_the_last_bit(launch: Launch, whole: Whole, tmp_path: Path) -> None:
    """With processes that load data. (Under DDP and FSDP: test_killed.py.) Tried without: restoring the random
    numbers (dropout), the optimizer, what was summed up since the last record; cutting the order of the epoch and the
    record off where the checkpoint was made."""
    run = killed_and_resumed(launch, "cpu", (*SHORT, *WORKER), tmp_path / "run")
    assert_same_run(run, whole("cpu", *EACH_STEP))


SMOOTH = ("--task.dropout=0", "--optim.lr=1e-4", *SHORT, "--checkpoint.keep_last=9")
EVERY_STRATEGY = [("cpu", 1), ("ddp", 2), ("fsdp", 2), ("fsdp", 4), ("fsdp_offload", 2)]

WITH_HSDP = [(("fsdp", 2), ("hsdp", 4)), (("hsdp", 4), ("cpu", 1)), (("hsdp", 4), ("hsdp", 4))]


@pytest.mark.slow
@pytest.mark.xdist_group("strategies")
@pytest.mark.parametrize(("origin", "to"), list(itertools.permutations(EVERY_STRATEGY, 2)) + WITH_HSDP)
def test_saved_under_any_strategy_and_resumed_under_any_other(
    launch: Launch, whole: Whole, rounding: Rounding, origin: tuple[str, int], to: tuple[str, int]
) -> None:
    """Tried without taking shards apart anew: reading fails. Tried with a checkpoint of another seed: losses differ."""
    saved = whole(origin[0], *SMOOTH, processes=origin[1])
    source = saved.folder / "checkpoints" / "step_00000016"
    run = launch(to[0], *SMOOTH, f"--resume={source}", processes=to[1]).succeeded()
    alone = whole("cpu", *SMOOTH, processes=1)
    assert run.records[0]["step"] == 17
    within = rounding("cpu", *SMOOTH, processes=1)
    assert run.losses == pytest.approx(alone.losses[16:], rel=within)
    assert run.summary["eval/loss"] == pytest.approx(alone.summary["eval/loss"], rel=within)
    assert f"saved under {saved.summary['strategy']} x {origin[1]}" in run.stdout
    for name, weight in weights(alone).items():
        assert weights(run)[name].norm().item() == pytest.approx(weight.norm().item(), rel=1e-5)


@pytest.mark.parametrize(
    ("yaml", "more"), [("ddp", ()), slow("cpu", ()), slow("fsdp", ()), slow("fsdp_grad_op", (f"--seed={2**32 - 1}",))]
)
def test_at_the_end_of_an_epoch(launch: Launch, whole: Whole, tmp_path: Path, yaml: str, more: tuple[str, ...]) -> None:
    """An epoch has 23 steps, and at its end there is an evaluation, which comes before the save: it is not made again.
    Tried without `step > progress.evaluated`: the record has it twice. And with the largest seed; tried without the
    remainder: the second process has one that numpy refuses, and after a resume the first one too."""
    expected = whole(yaml, *EACH_STEP, *more)
    run = launch(yaml, *SHORT, *more, folder=cut_back(expected, tmp_path / "run", 23)).succeeded()
    assert "after step 23, from" in run.stdout
    assert_same_run(run, expected)


def test_a_longer_run_goes_on_from_the_end(launch: Launch, tmp_path: Path) -> None:
    """With the records of the longer run, but for the evaluation at the end of the shorter, in the same run of W&B.
    Tried without restoring what was summed up: the first record after step 18 is of fewer steps; with a new id each
    time: two runs in W&B."""
    arguments, folder = (*SHORT, "--log_every=4"), tmp_path / "run"
    whole = launch("cpu", *arguments).succeeded()
    shorter = launch("cpu", *arguments, "--max_steps=18", folder=folder, wandb="offline").succeeded()
    assert (shorter.summary["step"], (folder / "model").is_dir()) == (18, True)
    longer = launch("cpu", *arguments, folder=folder, wandb="offline").succeeded()
    assert "changed since: max_steps 18 -> 30" in longer.stdout
    assert [record for record in curve(longer) if record["step"] != 18] == curve(whole)
    assert_equal(weights(longer), weights(whole))
    recorded = [path.name.rpartition("-")[2] for path in folder.glob("wandb/offline-run-*")]
    assert (len(recorded), len(set(recorded))) == ((2, 1) if WANDB else (0, 0))


def test_a_finished_run_is_exported_anew(launch: Launch, whole: Whole, tmp_path: Path) -> None:  # room: best
    """Or where its model was deleted. Tried without: "nothing to do"."""
    folder = Path(shutil.copytree(whole("cpu", *EACH_STEP).folder, tmp_path / "run"))
    best = (*SHORT, "--checkpoint.export_best=true", "--checkpoint.mode=max")
    before, last = (record["eval/loss"] for record in whole("cpu", *EACH_STEP).records if "eval/loss" in record)
    assert before > last
    assert launch("cpu", *best, folder=folder).succeeded().summary["eval/loss"] == before
    shutil.rmtree(folder / "model")
    assert launch("cpu", *best, folder=folder).succeeded().summary["eval/loss"] == before
    assert (folder / "model" / "model.safetensors").exists()


def move(folder: Path, to: Path) -> None:
    """And leave a link."""
    shutil.move(folder, to)
    folder.symlink_to(to)


def modified(folder: Path) -> dict[Path, int]:
    return {path: path.stat().st_mtime_ns for path in folder.rglob("*") if path.is_file()}


def test_checkpoints_on_another_disk_are_the_runs_own(launch: Launch, whole: Whole, tmp_path: Path) -> None:
    """An unfinished run goes on in its record, a finished one is left alone, and rotation deletes no more of a
    checkpoint that was moved by itself than the link. Tried with resolving the link: the record is cut to nothing."""
    finished = whole("ddp", *EACH_STEP)
    folder = cut_back(finished, tmp_path / "run", 22, 23, 24)
    move(folder / "checkpoints" / "step_00000022", tmp_path / "alone")
    move(folder / "checkpoints", tmp_path / "disk")
    assert_same_run(launch("ddp", *SHORT, folder=folder).succeeded(), finished)
    assert checkpoints(folder) == [24, 30]
    assert (tmp_path / "alone" / "manifest.json").exists()
    before = modified(tmp_path)
    again = launch("ddp", *SHORT, folder=folder).succeeded()
    assert again.stdout.splitlines()[-1].endswith("finished: nothing to do; raise --epochs or --max_steps")
    assert modified(tmp_path) == before


def test_a_record_that_was_cut_is_not_written_on(whole: Whole, tmp_path: Path) -> None:
    """Tried without: the run goes on, with a part of its record."""
    folder = cut_back(whole("cpu", *EACH_STEP), tmp_path / "run", 24)
    record = folder / "metrics.jsonl"
    text = record.read_text()
    record.write_text(text[:100])
    assert refusal(folder)[0].startswith(f"{record} has 100 bytes, and had ")
    assert record.read_text() == text[:100]


def test_an_evaluation_that_is_in_no_checkpoint_stays(launch: Launch, whole: Whole, tmp_path: Path) -> None:
    """Of a run that was stopped right before its last evaluation, made it when it went on, and then went on for
    more steps; but it can't have fewer. Tried without: it is cut off; and with naming the own checkpoint: the run is a
    branch afterwards."""
    finished = whole("cpu", *EACH_STEP)
    folder = cut_back(finished, tmp_path / "run", 24)
    own = f"{folder}/checkpoints/step_00000024"
    shorter = launch("cpu", *SHORT, "--max_steps=24", f"--resume={own}", folder=folder).succeeded()
    assert "changed since: max_steps 30 -> 24" in shorter.stdout
    refused = launch("cpu", *SHORT, "--max_steps=23", folder=folder)
    assert refused.messages == [f"train.py: {own} has 24 steps already, but epochs=10 and max_steps=23 make 23"]
    longer = launch("cpu", *SHORT, folder=folder).succeeded()
    evaluated = [record for record in curve(longer) if "eval/loss" in record]
    assert [record["step"] for record in evaluated] == [23, 24, 30]
    assert [record for record in curve(longer) if record != evaluated[1]] == curve(finished)
    assert yaml.safe_load((folder / "config.yaml").read_text())["resume"] == "auto"


def test_a_shorter_schedule_is_another_run(whole: Whole) -> None:
    """Where the steps asked for are more than those of the epochs, they are what the schedule spans."""
    state = format.read_state(whole("cpu", *EACH_STEP).folder / "checkpoints" / "step_00000024")
    for then, now, is_refused in (
        ({"max_steps": 300}, {"max_steps": 250}, True),  # an epoch has 23 steps, so 10 of them 230
        ({"max_steps": 200}, {"max_steps": 100}, False),
        ({"max_steps": None}, {"max_steps": 230}, False),
        ({"max_steps": None}, {"max_steps": 231}, False),
        ({"max_steps": 231}, {"max_steps": None}, True),
        ({"epochs": 10, "max_steps": 100}, {"epochs": 9, "max_steps": 100}, True),
        ({"epochs": 9, "max_steps": 300}, {"epochs": 10, "max_steps": 300}, False),
    ):
        saved = dataclasses.replace(state, config=state.config | then)
        config = config_from(state.config | now, TASKS)
        if is_refused:
            with pytest.raises(ValueError, match="the learning rate's schedule then spans 2[0-9]+ steps, not "):
                note_changes(config, Path("step_00000024"), saved)
        else:
            note_changes(config, Path("step_00000024"), saved)


def test_changed_settings_are_refused_unless_asked_for(launch: Launch, whole: Whole, tmp_path: Path) -> None:
    """And nothing is touched. Tried without refusing: it trains on."""
    folder = cut_back(whole("cpu", *EACH_STEP), tmp_path / "run", 24)
    free = ("--wandb.tags=[x]",) if WANDB else ()
    changed = ("--optim.lr=0.001", "--global_batch_size=32", "--micro_batch_size=16", *free)
    before = modified(folder)
    (line,) = refusal(folder, *changed)
    assert "global_batch_size 64 -> 32, optim.lr 0.003 -> 0.001; set them back" in line
    assert modified(folder) == before
    branch = (*SHORT, *changed, f"--resume={folder}/checkpoints/step_00000024", "--checkpoint.accept_changes=true")
    asked = launch("cpu", *branch).succeeded()
    assert "changed since: global_batch_size 64 -> 32, optim.lr 0.003 -> 0.001" in asked.stdout
    assert [record["step"] for record in asked.records if "train/loss" in record] == list(range(25, 31))


def test_a_checkpoint_of_another_run_starts_a_branch(launch: Launch, whole: Whole) -> None:
    """With a record and a W&B run of its own; the run that it comes from stays as it is. Tried without comparing
    with the newest checkpoint of its own: what came after is overwritten."""
    origin = whole("cpu", *EACH_STEP)
    source = origin.folder / "checkpoints" / "step_00000025"
    before = modified(origin.folder)
    branch = launch("cpu", *SHORT, f"--resume={source}", wandb="offline").succeeded()
    assert branch.records[0]["step"] == 26
    assert modified(origin.folder) == before
    own = (*SHORT, "--task.source=digits", f"--output_dir={origin.folder}")
    assert "whose newest checkpoint is not" in mistakes(*own, f"--resume={source}")[0]
    assert mistakes(*own, f"--resume={source}x")[0].endswith("not a checkpoint; auto, never, or a folder step_…")
    assert "holds a run already" in mistakes(*own, "--resume=never")[0]


def test_missing_random_numbers_are_a_loud_warning(launch: Launch, whole: Whole, tmp_path: Path) -> None:
    """Dropout can't go on as it was: said loudly, and the rest goes on. Tried without looking: a traceback."""
    folder = cut_back(whole("cpu", *EACH_STEP), tmp_path / "run", 29)
    (folder / "checkpoints" / "step_00000029" / "rng_00001.json").unlink()
    run = launch("cpu", *SHORT, folder=folder).succeeded()
    assert "WARNING" in run.stdout
    assert "rng_00001.json is missing" in run.stdout


def test_resuming_reads_no_batch_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    """The order is cut off, not replayed. Tried with skipping batches instead: 23 are made."""
    made = Mock(side_effect=batches.fetch)
    monkeypatch.setattr(batches, "fetch", made)
    config = run_settings(["--task.source=digits", *SHORT])
    train_set, _ = config.task.build_datasets()
    facts = {"rank": 0, "world_size": 1, "steps_per_epoch": 23, "device": torch.device("cpu")}
    run: Any = SimpleNamespace(config=config, train_set=train_set, **facts)
    *_, ((expected, *_),) = batches.training_steps(run, 0, 23)
    made.reset_mock()
    (((data, *_),),) = batches.training_steps(run, 22, 23)
    assert torch.equal(data["images"], expected["images"])
    assert made.call_count == 1


def test_a_branch_goes_on_by_the_same_command(launch: Launch, whole: Whole, tmp_path: Path) -> None:
    """From its own newest checkpoint, and from where it branched off while it has none, which each launch remembers
    for the next. Tried without `config.origin` in config.yaml: the third launch starts over."""
    origin = whole("cpu", *EACH_STEP).folder / "checkpoints" / "step_00000024"
    folder, branch = tmp_path / "run", f"--resume={origin}"
    for start in (branch, "--resume=auto"):
        with Started("cpu", *SHORT, start, folder=folder) as started:
            started.wait_for(f"after step 24, from {origin}").kill_all()
    run = launch("cpu", *SHORT, folder=folder).succeeded()
    assert f"after step 24, from {origin}" in run.stdout
    assert [record["step"] for record in run.records if "train/loss" in record] == list(range(25, 31))
    assert found(folder, branch).checkpoint == folder / "checkpoints" / "step_00000030"


def test_one_run_is_written_by_one_process(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Tried with a lock that can be shared."""
    monkeypatch.setattr(occupied, "PATIENCE_SECONDS", 1)
    lock(tmp_path)
    with pytest.raises(ValueError, match="another process is writing this run"):
        lock(tmp_path)


def test_a_value_that_is_no_number_is_the_same_after_a_checkpoint(tmp_path: Path) -> None:
    """Such as the mean of an empty column, in what a task keeps of its data. Tried without: NaN differs from NaN."""
    facts = {"examples": 5, "data": ["one", "other"], "data_state": {"mean": {"a": math.nan, "b": 1.0}}}
    require_same_data(tmp_path, json.loads(json.dumps(facts)), facts)
    changed = {**facts, "data_state": {"mean": {"a": math.nan, "b": 2.0}}}
    with pytest.raises(UserError, match="mean"):
        require_same_data(tmp_path, json.loads(json.dumps(facts)), changed)
