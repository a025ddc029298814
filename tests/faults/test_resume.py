"""A run that was stopped resumes exactly: log, order of the data and final weights are those of one that was not."""

import itertools
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch
import yaml

from src.training import batches
from tests.core.test_parity import PARTS, TASKS
from tests.curves import Short, cells
from tests.faults.runs import (
    ALL,
    TINY,
    assert_equal,
    assert_same_run,
    checkpoints,
    contents,
    curve,
    cut_back,
    evaluations,
    found,
    weights,
    whole_tensors,
)
from tests.launching import Launch, Rounding, Whole
from train import run_settings

SMOOTH = ("--task.dropout=0", "--optim.lr=1e-4", *ALL)
STRATEGIES = [("cpu", 1), ("ddp", 2), ("fsdp", 2), ("fsdp", 4), ("fsdp_offload", 2)]
WITH_HSDP = [(("fsdp", 2), ("hsdp", 4)), (("hsdp", 4), ("cpu", 1)), (("hsdp", 4), ("hsdp", 4))]
EPOCH = (*TINY, "--max_steps=10", "--save_every=8", "--global_batch_size=200")
"""An epoch has 8 steps, the last of 38 examples: a checkpoint and an evaluation at its end."""
ALL_TASKS = TASKS | {
    "end of an epoch": Short(EPOCH, saved=8),
    "rates and averages": Short((*EPOCH, *PARTS, "--checkpoint.export_best=true", "--checkpoint.mode=max"), saved=8),
    "the largest seed": Short((*EPOCH, f"--seed={2**32 - 1}"), saved=8),
}
TABLE: tuple[str, ...] = (
    "                    cpu  ddp  fsdp fsdp_grad_op",
    "end of an epoch     slow fast slow -",
    "rates and averages  slow slow fast -",
    "the largest seed    -    -    -    slow",
)
TABLE += (
    "lm with dropout   slow slow fast -",
    "lm with adapters  -    -    fast -",
    "lm with DoRA      -    -    slow -",
    "lm with PiSSA     -    slow fast -",
    "lm in 4 bits      fast -    -    -",
    "chat              -    -    slow -",
    "several labels    -    -    fast -",
    "classifier        -    -    slow -",
    "experts           -    -    slow -",
)
TABLE += (
    "pictures          -    -    slow -",
    "table             -    -    slow -",
)
TABLE += ("pairs             -    -    slow -",)
"""Runs that end at a checkpoint; test_killed.py and test_preemption.py kill runs for real."""


@pytest.mark.parametrize(("name", "yaml", "processes"), cells(*TABLE))
def test_each_task_resumes_exactly(
    launch: Launch, whole: Whole, shared: Path, tmp_path: Path, name: str, yaml: str, processes: int
) -> None:
    """With dropout, accumulation and packing, into the second epoch."""
    task = ALL_TASKS[name].ready(shared)
    expected = task.run(whole, yaml)
    run = task.run(launch, yaml, folder=cut_back(expected, tmp_path / "run", task.saved)).succeeded()
    assert f"after step {task.saved}, from" in run.stdout
    assert curve(run) == curve(expected)
    last = f"checkpoints/step_{checkpoints(expected.folder)[-1]:08d}"
    assert_equal(whole_tensors(run.folder / last), whole_tensors(expected.folder / last))


@pytest.mark.slow
@pytest.mark.xdist_group("strategies")
@pytest.mark.parametrize(("origin", "to"), list(itertools.permutations(STRATEGIES, 2)) + WITH_HSDP)
def test_saved_under_any_strategy_it_resumes_under_any_other(
    launch: Launch, whole: Whole, rounding: Rounding, origin: tuple[str, int], to: tuple[str, int]
) -> None:
    saved = whole(origin[0], *SMOOTH, processes=origin[1])
    source = saved.folder / "checkpoints" / "step_00000008"
    run = launch(to[0], *SMOOTH, f"--resume={source}", processes=to[1]).succeeded()
    alone, within = whole("cpu", *SMOOTH, processes=1), rounding("cpu", *SMOOTH, processes=1)
    assert run.records[0]["step"] == 9
    assert run.losses == pytest.approx(alone.losses[8:], rel=within)
    assert run.summary["eval/loss"] == pytest.approx(alone.summary["eval/loss"], rel=within)
    assert f"saved under {saved.summary['strategy']} x {origin[1]}" in run.stdout


def test_resuming_reads_no_batch_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    """At the last of an epoch's 8 steps, the 7 before it are not made."""
    made = Mock(side_effect=batches.fetch_batch)
    monkeypatch.setattr(batches, "fetch_batch", made)
    config = run_settings(["--task.source=digits", *EPOCH])
    train_set, _ = config.task.build_datasets()
    place = {"data_rank": 0, "data_size": 1, "steps_per_epoch": 8, "device": torch.device("cpu")}
    run: Any = SimpleNamespace(config=config, train_set=train_set, **place)
    *_, ((expected, *_),) = batches.training_steps(run, 0, 8)
    made.reset_mock()
    (((data, *_),),) = batches.training_steps(run, 7, 8)
    assert torch.equal(data["images"], expected["images"])
    assert made.call_count == 1


def test_an_extended_run_resumes_from_its_end(launch: Launch, whole: Whole, tmp_path: Path) -> None:
    """Each record is the mean over all steps since the last one."""
    expected, arguments, folder = whole("cpu", *ALL), (*TINY, "--log_every=4"), tmp_path / "run"
    shorter = launch("cpu", *arguments, "--max_steps=6", folder=folder).succeeded()
    assert (shorter.summary["step"], (folder / "model").is_dir()) == (6, True)
    longer = launch("cpu", *arguments, folder=folder).succeeded()
    assert "changed since: max_steps 6 -> 14" in longer.stdout
    assert_equal(weights(longer), weights(expected))
    assert evaluations(longer)[1:] == evaluations(expected)
    means = {end: np.mean(expected.losses[start:end]) for start, end in ((0, 4), (4, 6), (4, 8), (8, 12), (12, 14))}
    logged = {record["step"]: record["train/loss"] for record in longer.records if "train/loss" in record}
    assert logged == pytest.approx(means, rel=1e-12)


def test_an_extended_run_has_the_log_of_one_that_never_ended(launch: Launch, whole: Whole, tmp_path: Path) -> None:
    """Its last evaluation, made when it was resumed right before it, is in no checkpoint."""
    finished = whole("cpu", *ALL)
    folder = cut_back(finished, tmp_path / "run", 12)
    own = f"{folder}/checkpoints/step_00000012"
    launch("cpu", *TINY, "--max_steps=12", f"--resume={own}", folder=folder).succeeded()
    refused = launch("cpu", *TINY, "--max_steps=11", folder=folder)
    assert refused.messages == [f"train.py: {own} already has 12 steps, but epochs=10 and max_steps=11 make 11"]
    longer = launch("cpu", *TINY, folder=folder).succeeded()
    assert curve(longer) == curve(finished)
    assert yaml.safe_load((folder / "config.yaml").read_text())["resume"] == "auto", "not a branch"


def test_a_finished_run_is_exported_anew(launch: Launch, whole: Whole, tmp_path: Path) -> None:
    """By other settings, or as its model was deleted."""
    folder = Path(shutil.copytree(whole("cpu", *ALL).folder, tmp_path / "run"))
    best = (*TINY, "--checkpoint.export_best=true", "--checkpoint.mode=max")
    before, last = (record["eval/loss"] for record in evaluations(whole("cpu", *ALL)))
    assert before > last
    assert launch("cpu", *best, folder=folder).succeeded().summary["eval/loss"] == before
    shutil.rmtree(folder / "model")
    assert launch("cpu", *best, folder=folder).succeeded().summary["eval/loss"] == before
    assert (folder / "model" / "model.safetensors").exists()


def test_checkpoints_may_be_links_to_another_disk(launch: Launch, whole: Whole, tmp_path: Path) -> None:
    """All of them, or one: rotation deletes its link alone."""
    finished = whole("cpu", *ALL)
    folder = cut_back(finished, tmp_path / "run", 4, 8, 12)
    for path, to in (("checkpoints/step_00000004", "alone"), ("checkpoints", "disk")):
        shutil.move(folder / path, tmp_path / to)
        (folder / path).symlink_to(tmp_path / to)
    assert_same_run(launch("cpu", *TINY, folder=folder).succeeded(), finished)
    assert checkpoints(folder) == [12, 14]
    assert (tmp_path / "alone" / "manifest.json").exists()
    before = contents(tmp_path)
    assert "this run has finished" in launch("cpu", *TINY, folder=folder).succeeded().stdout
    assert contents(tmp_path) == before


def test_a_branch_resumes_by_the_same_command(launch: Launch, whole: Whole, tmp_path: Path) -> None:
    """Though it was killed before its first checkpoint."""
    trunk = whole("cpu", *ALL).folder
    origin, before = trunk / "checkpoints" / "step_00000012", contents(trunk)
    folder, branch, arguments = tmp_path / "run", f"--resume={origin}", (*TINY, "--save_every=5")
    for start in (branch, "--resume=auto"):
        killed = launch("cpu", *arguments, start, folder=folder, FAULT="die", FAULT_STEP="1")
        assert f"after step 12, from {origin}" in killed.stdout
    run = launch("cpu", *arguments, folder=folder).succeeded()
    assert f"after step 12, from {origin}" in run.stdout
    assert [record["step"] for record in run.records if "train/loss" in record] == [13, 14]
    assert found(folder, branch).checkpoint == folder / "checkpoints" / "step_00000014"
    assert contents(trunk) == before
