"""Saves that fail don't end the run, and what is kept is what was asked for."""

import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest
import torch

from src.checkpoint import folders
from src.checkpoint.tensors import read, saved_tensors
from tests import tiny
from tests.conftest import PROJECT, Launch, Run, clean_environment, launch_command
from tests.faults.runs import SHORT, checkpoints, curve, weights

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")  # in this process, to read


def launched_with_small_files(config: str, *arguments: str, folder: Path) -> Run:
    """No file may grow beyond 6 MB: the model, of 4.8, fits, and a shard of 7.2 or 14.4 does not."""
    command = ["bash", "-c", 'ulimit -f 6000; exec "$@"', "bash", *launch_command(config, *arguments, folder=folder)]
    done = subprocess.run(command, cwd=PROJECT, env=clean_environment(), capture_output=True, text=True, timeout=300)
    return Run(done.returncode, done.stdout, done.stderr, folder)


@pytest.mark.parametrize("yaml", ["cpu", "ddp"])
def test_a_full_disk_is_a_warning_and_the_checkpoint_before_stays(launch: Launch, tmp_path: Path, yaml: str) -> None:
    """Tried without catching: the run ends. Tried without deleting: the half-written files stay and fill the disk."""
    folder, whole = tmp_path / "run", launch(yaml, *SHORT)
    launch(yaml, *SHORT, "--max_steps=8", folder=folder).succeeded()
    run = launched_with_small_files(yaml, *SHORT, folder=folder)
    assert run.exit_code == 0, run.stderr
    warnings = [line for line in run.stdout.splitlines() if "WARNING" in line]
    assert [line.split(":")[1] for line in warnings] == [f" no checkpoint of step {step}" for step in (16, 24, 30)]
    assert all(line.endswith(f"the last one is {folder}/checkpoints/step_00000008") for line in warnings)
    assert [path.name for path in (folder / "checkpoints").iterdir()] == ["step_00000008"]
    assert all(torch.equal(weight, weights(whole)[name]) for name, weight in weights(run).items())


def test_an_output_folder_that_cannot_be_written_is_refused_before_anything_is_loaded(launch: Launch) -> None:
    refused = launch("cpu", *SHORT, folder=Path("/proc/run"))
    assert refused.exit_code != 0
    (line,) = refused.messages
    assert line.startswith("train.py: output_dir=/proc/run: cannot write in /proc, ")


@pytest.fixture(scope="module")
def judged(launch: Launch) -> Run:
    """Evaluated after each fourth step, and the two best kept: to be told from the last, those of the highest loss."""
    return launch(
        "ddp", *SHORT, "--eval_every=4", "--checkpoint.keep_best=2", "--checkpoint.keep_last=1",
        "--checkpoint.export_best=true", "--checkpoint.metric=eval/loss", "--checkpoint.mode=max",
    ).succeeded()  # fmt: skip


def losses(run: Run) -> dict[int, float]:
    """Of the evaluations, by step."""
    return {record["step"]: record["eval/loss"] for record in run.records if "eval/loss" in record}


def test_the_newest_and_the_best_are_kept(judged: Run) -> None:
    """Tried without the best: only step 30 is left."""
    best = sorted(losses(judged), key=lambda step: losses(judged)[step], reverse=True)[:2]
    assert max(best) < 24
    assert checkpoints(judged.folder) == sorted([*best, 30])


def test_the_best_is_exported_and_reported(judged: Run) -> None:
    best = max(losses(judged), key=lambda step: losses(judged)[step])
    checkpoint = judged.folder / "checkpoints" / f"step_{best:08d}"
    assert judged.summary["eval/loss"] == losses(judged)[best]
    for name, weight in weights(judged).items():
        saved = torch.empty_like(weight)
        read(checkpoint, {f"model.{name}": saved})
        assert torch.equal(weight, saved), name


def test_early_stopping_ends_all_processes_together_and_after_a_resume_too(launch: Launch, tmp_path: Path) -> None:
    """A gain must be of 100: the first evaluation is the best, and the third one without a gain the last."""
    arguments = (*SHORT, "--eval_every=4", "--early_stopping.metric=eval/loss", "--early_stopping.min_delta=100")
    whole = launch("fsdp", *arguments, "--early_stopping.patience=3").succeeded()
    assert whole.summary["step"] == 16
    assert json.loads((whole.folder / "status.json").read_text())["status"] == "done"
    shorter = launch("fsdp", *arguments, "--early_stopping.patience=3", "--max_steps=10", folder=tmp_path / "run")
    assert shorter.succeeded().summary["step"] == 10
    longer = launch("fsdp", *arguments, "--early_stopping.patience=3", folder=tmp_path / "run").succeeded()
    assert [r["step"] for r in longer.records if "eval/loss" in r] == [4, 8, 10, 12]  # that of step 10 counts too
    again = launch("fsdp", *arguments, "--early_stopping.patience=3", folder=whole.folder).succeeded()
    assert "nothing to do" in again.stdout


@pytest.mark.parametrize("setting", ["early_stopping.metric", "checkpoint.metric"])
def test_a_metric_that_does_not_exist_is_named(launch: Launch, setting: str) -> None:
    run = launch("cpu", *SHORT, "--eval_every=2", f"--{setting}=eval/acuracy", "--checkpoint.keep_best=1")
    assert run.exit_code != 0
    assert run.messages == [
        f"train.py: {setting}=eval/acuracy: the evaluation has no such metric, did you mean eval/accuracy? "
        "(eval/loss, eval/examples, eval/accuracy)"
    ]


def test_a_checkpoint_is_hardly_larger_than_its_tensors_and_says_what_it_is_of(judged: Run) -> None:
    checkpoint = judged.folder / "checkpoints" / "step_00000030"
    tensors = saved_tensors(checkpoint)
    assert sorted(name for name in tensors if name.startswith("model.")) == sorted(
        f"model.{n}" for n in weights(judged)
    )
    size = sum(facts.size.numel() * facts.properties.dtype.itemsize for facts in tensors.values())
    assert folders.size_on_disk(checkpoint) <= 1.02 * size
    state = folders.read_state(checkpoint)
    assert (state["strategy"], state["num_processes"], state["config"]["save_every"]) == ("ddp", 2, 8)


def test_adapters_are_saved_without_the_model_that_they_adapt(launch: Launch, tmp_path: Path) -> None:
    """And go on to the last bit, but only beside the weights that they were trained with."""
    model, data = tiny.llama(tmp_path / "llama"), tiny.questions(tmp_path / "questions.jsonl")
    arguments = (
        "--task.name=causal_lm", f"--task.model={model}", f"--task.dataset={data}", "--task.lora.r=4",
        "--task.sequence_length=64", "--global_batch_size=4", *SHORT,
    )  # fmt: skip
    whole = launch("fsdp", *arguments).succeeded()
    shards = (whole.folder / "checkpoints" / "step_00000030").glob("shard-*")
    assert sum(shard.stat().st_size for shard in shards) < os.path.getsize(model / "model.safetensors")
    launch("fsdp", *arguments, "--max_steps=16", folder=tmp_path / "run").succeeded()
    run = launch("fsdp", *arguments, folder=tmp_path / "run").succeeded()
    assert [record for record in curve(run) if record["step"] > 16] == [r for r in curve(whole) if r["step"] > 16]
    tiny.llama(tmp_path / "other", seed=1)
    shutil.copy(tmp_path / "other" / "model.safetensors", model)
    other = launch("fsdp", *arguments, "--max_steps=40", folder=tmp_path / "run")
    assert "was trained beside other frozen weights" in other.messages[0]
