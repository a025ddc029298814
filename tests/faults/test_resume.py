"""A run that was killed goes on exactly: losses, record and final weights are those of a run in one piece."""

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
from tests.core.test_parity import TASKS
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
    source = saved.folder / "checkpoints" / "step_00000008"
    run = launch(to[0], *SMOOTH, f"--resume={source}", processes=to[1]).succeeded()
    alone = whole("cpu", *SMOOTH, processes=1)
    assert run.records[0]["step"] == 9
    within = rounding("cpu", *SMOOTH, processes=1)
    assert run.losses == pytest.approx(alone.losses[8:], rel=within)
    assert run.summary["eval/loss"] == pytest.approx(alone.summary["eval/loss"], rel=within)
    assert f"saved under {saved.summary['strategy']} x {origin[1]}" in run.stdout


TOLD = """
from src.training.progress import Progress
metrics = Progress.training_metrics
def told(self, num_examples, is_fp16):
    print(f"after step {self.step}: of {num_examples} examples")
    return metrics(self, num_examples, is_fp16)
Progress.training_metrics = told
"""


def test_the_first_record_is_of_all_since_the_last_one(launch: Launch, whole: Whole, tmp_path: Path) -> None:
    """Whatever log_every is by then: its seconds are. Tried with the grid of the new log_every: 16 examples."""
    folder = cut_back(whole("cpu", *ALL, "--log_every=5"), tmp_path / "run", 8)
    run = launch("cpu", *ALL, folder=folder, before=TOLD).succeeded()
    assert "after step 9: of 64 examples" in run.stdout
    assert "after step 10: of 16 examples" in run.stdout


EPOCH = (*TINY, "--max_steps=10", "--save_every=8", "--global_batch_size=200")
"""An epoch has 8 steps, the last of 38 examples: a checkpoint and an evaluation at its end."""
ALL_TASKS = TASKS | {
    "end of an epoch": Short(EPOCH, saved=8),
    "the largest seed": Short((*EPOCH, f"--seed={2**32 - 1}"), saved=8),
}
TABLE: tuple[str, ...] = (
    "                  cpu  ddp  fsdp fsdp_grad_op",
    "end of an epoch   slow fast slow -",
    "the largest seed  -    -    -    slow",
)
TABLE += (  # room: text
    "lm with dropout   slow slow fast -",
    "lm with adapters  -    -    fast -",
    "lm in 4 bits      fast -    -    -",
    "chat              -    -    slow -",
)
TABLE += (  # room: examples
    "pictures          -    -    fast -",
    "table             -    -    slow -",
)
TABLE += (  # room: text+examples
    "pairs             -    -    slow -",
)
"""Killed for real, and otherwise: test_killed.py, test_preemption.py, text/test_streaming.py."""


@pytest.mark.parametrize(("name", "yaml", "processes"), cells(*TABLE))
def test_each_task_goes_on_to_the_last_bit(
    launch: Launch, whole: Whole, shared: Path, tmp_path: Path, name: str, yaml: str, processes: int
) -> None:
    """With dropout, accumulation and packing, into the second epoch. Tried without: restoring random numbers, optimizer
    and sums, cutting order and record off, `step > progress.evaluated`, the remainder of the largest seed."""
    task = ALL_TASKS[name].ready(shared)
    expected = task.run(whole, yaml)
    run = task.run(launch, yaml, folder=cut_back(expected, tmp_path / "run", task.saved)).succeeded()
    assert f"after step {task.saved}, from" in run.stdout
    assert curve(run) == curve(expected)
    last = f"checkpoints/step_{checkpoints(expected.folder)[-1]:08d}"
    assert_equal(whole_tensors(run.folder / last), whole_tensors(expected.folder / last))


def test_a_longer_run_goes_on_from_the_end(launch: Launch, whole: Whole, tmp_path: Path) -> None:
    """Each record is the mean since the last. Tried without restoring what was summed up: it is of fewer steps."""
    expected, arguments, folder = whole("cpu", *ALL), (*TINY, "--log_every=4"), tmp_path / "run"
    shorter = launch("cpu", *arguments, "--max_steps=6", folder=folder).succeeded()
    assert (shorter.summary["step"], (folder / "model").is_dir()) == (6, True)
    longer = launch("cpu", *arguments, folder=folder).succeeded()
    assert "changed since: max_steps 6 -> 14" in longer.stdout
    assert_equal(weights(longer), weights(expected))
    assert evaluations(longer)[1:] == evaluations(expected)
    means = {end: np.mean(expected.losses[start:end]) for start, end in ((0, 4), (4, 6), (4, 8), (8, 12), (12, 14))}
    found = {record["step"]: record["train/loss"] for record in longer.records if "train/loss" in record}
    assert found == pytest.approx(means, rel=1e-12)


def test_a_finished_run_is_exported_anew(launch: Launch, whole: Whole, tmp_path: Path) -> None:
    """Or where its model was deleted. Tried without: "nothing to do"."""
    folder = Path(shutil.copytree(whole("cpu", *ALL).folder, tmp_path / "run"))
    best = (*TINY, "--checkpoint.export_best=true", "--checkpoint.mode=max")
    before, last = (record["eval/loss"] for record in evaluations(whole("cpu", *ALL)))
    assert before > last
    assert launch("cpu", *best, folder=folder).succeeded().summary["eval/loss"] == before
    shutil.rmtree(folder / "model")
    assert launch("cpu", *best, folder=folder).succeeded().summary["eval/loss"] == before
    assert (folder / "model" / "model.safetensors").exists()


def move(folder: Path, to: Path) -> None:
    """And leave a link."""
    shutil.move(folder, to)
    folder.symlink_to(to)


def test_checkpoints_on_another_disk_are_the_runs_own(launch: Launch, whole: Whole, tmp_path: Path) -> None:
    """Of a moved one, rotation deletes the link alone. Tried with resolving the link: the record is cut to nothing."""
    finished = whole("cpu", *ALL)
    folder = cut_back(finished, tmp_path / "run", 4, 8, 12)
    move(folder / "checkpoints" / "step_00000004", tmp_path / "alone")
    move(folder / "checkpoints", tmp_path / "disk")
    assert_same_run(launch("cpu", *TINY, folder=folder).succeeded(), finished)
    assert checkpoints(folder) == [12, 14]
    assert (tmp_path / "alone" / "manifest.json").exists()
    before = contents(tmp_path)
    again = launch("cpu", *TINY, folder=folder).succeeded()
    says = "this run has finished; to train longer, raise --epochs or --max_steps"
    assert again.stdout.splitlines()[-1].endswith(says)
    assert contents(tmp_path) == before


def test_a_run_that_ended_early_and_is_extended_has_the_log_of_one_that_did_not(
    launch: Launch, whole: Whole, tmp_path: Path
) -> None:
    """Its last evaluation, made when resumed right before it, is in no checkpoint. Tried with naming the own
    checkpoint: a branch."""
    finished = whole("cpu", *ALL)
    folder = cut_back(finished, tmp_path / "run", 12)
    own = f"{folder}/checkpoints/step_00000012"
    launch("cpu", *TINY, "--max_steps=12", f"--resume={own}", folder=folder).succeeded()
    refused = launch("cpu", *TINY, "--max_steps=11", folder=folder)
    assert refused.messages == [f"train.py: {own} already has 12 steps, but epochs=10 and max_steps=11 make 11"]
    longer = launch("cpu", *TINY, folder=folder).succeeded()
    assert [record["step"] for record in evaluations(longer)] == [8, 14]
    assert curve(longer) == curve(finished)
    assert yaml.safe_load((folder / "config.yaml").read_text())["resume"] == "auto"


def test_resuming_reads_no_batch_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    """The order is cut off, not replayed. Tried with skipping batches instead: 8 are made."""
    made = Mock(side_effect=batches.fetch_batch)
    monkeypatch.setattr(batches, "fetch_batch", made)
    config = run_settings(["--task.source=digits", *EPOCH])
    train_set, _ = config.task.build_datasets()
    facts = {"data_rank": 0, "data_size": 1, "steps_per_epoch": 8, "device": torch.device("cpu")}
    run: Any = SimpleNamespace(config=config, train_set=train_set, **facts)
    *_, ((expected, *_),) = batches.training_steps(run, 0, 8)
    made.reset_mock()
    (((data, *_),),) = batches.training_steps(run, 7, 8)
    assert torch.equal(data["images"], expected["images"])
    assert made.call_count == 1


def test_a_branch_goes_on_by_the_same_command(launch: Launch, whole: Whole, tmp_path: Path) -> None:
    """Tried without `config.origin` in config.yaml: the third launch starts over."""
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
