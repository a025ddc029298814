"""What cannot be saved is said, and costs no more than it must; what is kept and exported is what was asked for."""

import json
import math
from pathlib import Path
from typing import Any

import pytest

from tests.faults.runs import (
    ALL,
    TINY,
    assert_equal,
    assert_same_run,
    checkpoints,
    cut_back,
    evaluations,
    weights,
    whole_tensors,
)
from tests.launching import Launch, Started, Whole, slow


def no_files_above(kilobytes: int) -> str:
    """Return code that limits files as a full disk does. The model takes 4.8 MB, a shard of one process 14.4, and one
    of two 7.2."""
    return f"import resource as r; r.setrlimit(r.RLIMIT_FSIZE, ({kilobytes * 1024}, {kilobytes * 1024}))"


def test_a_full_disk_in_a_save_is_a_warning(launch: Launch, whole: Whole, tmp_path: Path) -> None:
    """What was half written is deleted, and would otherwise fill the disk."""
    expected = whole("ddp", *ALL)
    folder = cut_back(expected, tmp_path / "run", 8)
    run = launch("ddp", *TINY, folder=folder, before=no_files_above(6000)).succeeded()
    warnings = [line for line in run.stdout.splitlines() if "WARNING" in line]
    assert [line.split(":")[1] for line in warnings] == [f" no checkpoint of step {step}" for step in (12, 14)]
    assert all(line.endswith(f"the last one is {folder}/checkpoints/step_00000008") for line in warnings)
    shard = f"{folder}/checkpoints/tmp_step_00000014/shard-00001-model-00001-of-00001.safetensors"
    assert f"step 14: {shard} cannot be written, Error while serializing: I/O error: File too large" in warnings[-1]
    assert [path.name for path in (folder / "checkpoints").iterdir()] == ["step_00000008"]
    assert_same_run(run, expected)


SUMMARY_FAILS = (
    "import errno\nfrom src.tracking import tracker\n"
    "def write_json(file, content):\n    raise OSError(errno.ENOSPC, 'No space left on device', str(file))\n"
    "tracker.write_json = write_json\n"
)


@pytest.mark.parametrize(
    ("before", "says"),
    [
        (no_files_above(4000), "model cannot be written, Error while serializing: I/O error: File too large"),
        (no_files_above(4), "metrics.jsonl cannot be written (File too large): free some space"),
        (SUMMARY_FAILS, "summary.json cannot be written (No space left on device): free some space"),
    ],
    ids=["model", "log", "summary"],
)
def test_a_run_that_a_full_disk_ends_is_finished_by_the_same_command(
    launch: Launch, whole: Whole, tmp_path: Path, before: str, says: str
) -> None:
    """Its model goes where the link `model` leads."""
    (disk := tmp_path / "disk" / "model").mkdir(parents=True)
    folder = cut_back(whole("cpu", *ALL), tmp_path / "run", 12)
    (folder / "model").symlink_to(disk)
    run = launch("cpu", *TINY, folder=folder, before=before)
    assert run.exit_code == 1
    (line,) = run.messages
    assert line.startswith(f"train.py: {folder}/{says}")
    assert 'train.py", line' not in run.stderr, "a traceback"
    assert run.status["status"] == "unfinished"
    assert not (folder / "summary.json").exists()
    assert not [*folder.glob("tmp_*"), *disk.parent.glob("tmp_*")]
    again = launch("cpu", *TINY, folder=folder).succeeded()
    assert_same_run(again, whole("cpu", *ALL))
    assert again.status == {"status": "done", "step": 14}
    assert [path.name for path in disk.parent.iterdir()] == ["model"]


def test_file_systems_may_refuse_chmod_and_fsync_of_folders(launch: Launch, whole: Whole) -> None:
    """As blobfuse and CIFS do. The fsync of a file must not fail: its content may be lost."""
    refuse = (
        "import errno, os, stat\nfsync = os.fsync\n"
        "def chmod(*_, **__):\n    raise OSError(errno.EPERM, 'Operation not permitted')\n"
        "def fsync_of_files(descriptor):\n"
        "    if stat.S_ISDIR(os.fstat(descriptor).st_mode):\n        raise OSError(errno.EINVAL, 'Invalid argument')\n"
        "    fsync(descriptor)\n"
        "os.chmod, os.fchmod, os.fsync = chmod, chmod, fsync_of_files\n"
    )
    run = launch("ddp", *TINY, before=refuse).succeeded()
    assert "WARNING" not in run.stdout
    assert_same_run(run, whole("ddp", *ALL))
    fail = "import errno\ndef fsync(_):\n    raise OSError(errno.EIO, 'Input/output error')\n"
    run = launch("cpu", *TINY, "--max_steps=1", before=f"{fail}from src.checkpoint import write; write.sync = fsync")
    assert "WARNING: no checkpoint of step 1: [Errno 5] Input/output error; there is none yet" in run.stdout


@pytest.mark.slow
def test_a_save_in_which_a_process_hangs_ends_the_run(tmp_path: Path) -> None:
    """No further checkpoint could be saved."""
    fault: dict[str, Any] = {"FAULT": "stuck save", "FAULT_STEP": "8", "FAULT_RANK": "1"}
    fault["TORCH_ELASTIC_SHUTDOWN_TIMEOUT"] = "1"
    with Started("ddp", *TINY, "--timeout_minutes=0.1", folder=tmp_path / "run", **fault) as started:
        stuck = started.ended()
    assert stuck.exit_code != 0
    assert "process 0 timed out (timeout_minutes) waiting for another process" in stuck.messages[0]
    assert checkpoints(stuck.folder) == [4]


def test_metrics_that_are_not_finite_are_null_but_kept_in_checkpoints(launch: Launch) -> None:
    """JSON has no NaN."""
    odd = (
        "from src.tasks.mnist import Mnist\ntables = Mnist.tables\n"
        "Mnist.metrics = lambda *_: {'accuracy': float('nan'), 'worst': float('-inf')}\n"
        "Mnist.tables = lambda *of: tables(*of) | {'odd': [{'value': float('inf')}]}\n"
    )
    run = launch("cpu", *TINY, "--early_stopping.metric=eval/accuracy", "--max_steps=8", before=odd).succeeded()
    texts = [*(run.folder / "metrics.jsonl").read_text().splitlines(), (run.folder / "summary.json").read_text()]
    *_, record, summary = (json.loads(text, parse_constant=lambda name: pytest.fail(name)) for text in texts)
    for logged in (record, summary):
        assert (logged["eval/accuracy"], logged["eval/worst"]) == (None, None)
    assert record["eval/odd"] == [{"value": None}]
    state = json.loads((run.folder / "checkpoints" / "step_00000008" / "state.json").read_text())
    metrics = state["progress"]["evaluations"]["8"]
    assert math.isnan(metrics["eval/accuracy"])
    assert metrics["eval/worst"] == -math.inf


def test_the_newest_and_the_best_are_kept_and_the_best_is_exported(whole: Whole) -> None:
    """The best are those of the highest loss here, to be told from the last."""
    best_two = ("--checkpoint.keep_best=2", "--checkpoint.export_best=true", "--checkpoint.mode=max")
    run = whole("cpu", *TINY, "--eval_every=2", "--checkpoint.keep_last=1", *best_two)
    losses = {record["step"]: record["eval/loss"] for record in evaluations(run)}
    second, best = sorted(losses, key=losses.__getitem__)[-2:]
    assert max(best, second) < 12
    assert checkpoints(run.folder) == sorted([best, second, 14])
    assert run.summary["eval/loss"] == losses[best]
    saved = whole_tensors(run.folder / "checkpoints" / f"step_{best:08d}")
    assert_equal(weights(run), {name: saved[f"model.{name}"] for name in weights(run)})


def test_early_stopping_ends_all_processes_also_after_a_resume(launch: Launch, tmp_path: Path) -> None:
    """Another metric is counted anew."""
    early = ("metric=eval/loss", "min_delta=100", "patience=3")
    arguments = (*TINY, "--eval_every=2", *(f"--early_stopping.{setting}" for setting in early))
    stopped = launch("ddp", *arguments).succeeded()
    assert (stopped.summary["step"], stopped.status["status"]) == (8, "done")
    why = "ended by early stopping, as eval/loss has not improved in 3 evaluations"
    advice = f"{why}; to train longer, raise --early_stopping.patience"
    assert advice in stopped.stdout.splitlines()
    assert f"this run has finished; {advice}" in launch("cpu", *arguments, folder=stopped.folder).succeeded().stdout
    resumed = launch("cpu", *arguments, folder=cut_back(stopped, tmp_path / "run", 4)).succeeded()
    assert [record["step"] for record in evaluations(resumed)] == [2, 4, 6, 8]
    other = launch("cpu", *arguments, "--early_stopping.metric=eval/accuracy", folder=resumed.folder).succeeded()
    assert [record["step"] for record in evaluations(other)] == [2, 4, 6, 8, 10, 12, 14]


@pytest.mark.parametrize("yaml", ["ddp", slow("fsdp")])
def test_all_processes_skip_a_step_in_which_one_has_nan(launch: Launch, yaml: str) -> None:
    """It leaves no trace in weights and optimizer, and is counted."""
    arguments = (*TINY, "--max_steps=6", "--save_every=1", "--checkpoint.keep_last=3")
    run = launch(yaml, *arguments, FAULT="nan", FAULT_RANK="1", FAULT_STEP="5").succeeded()
    assert run.summary["skipped_steps"] == 1
    warnings = [line for line in run.stdout.splitlines() if line.startswith("WARNING: ")]
    assert warnings == ["WARNING: steps skipped so far because of non-finite gradients: 1"]
    (skipped,) = (record for record in run.records if record.get("train/loss", 0) is None)
    assert (skipped["step"], skipped["train/grad_norm"], skipped["train/skipped_steps"]) == (5, None, 1)
    before, after = (whole_tensors(run.folder / "checkpoints" / f"step_0000000{step}") for step in (4, 5))
    assert_equal(after, before)


def test_too_many_skipped_steps_in_a_row_end_the_run(launch: Launch) -> None:
    run = launch("ddp", *TINY, "--max_bad_steps=3", FAULT="nan forever", FAULT_RANK="1", FAULT_STEP="5")
    assert run.exit_code != 0
    (line,) = run.messages
    assert "3 consecutive steps had non-finite gradients" in line
    assert str(run.folder / "checkpoints" / "step_00000004") in line
    assert checkpoints(run.folder) == [4]
