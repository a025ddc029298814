"""Saves that fail don't end the run, and what is kept is what was asked for."""

import json
import math
import shutil
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
    found,
    weights,
    whole_tensors,
)
from tests.launching import Launch, Run, Started, Whole, slow


def with_small_files(launch: Launch, *arguments: str, yaml: str = "cpu", kilobytes: int = 6000, **more: Any) -> Run:
    """No file may grow beyond 6 MB: the model, of 4.8, fits, and a shard of 7.2 or 14.4 does not."""
    limit = f"import resource as r; r.setrlimit(r.RLIMIT_FSIZE, ({kilobytes * 1024}, {kilobytes * 1024}))"
    return launch(yaml, *arguments, before=limit, **more)


def test_a_full_disk_is_a_warning(launch: Launch, whole: Whole, tmp_path: Path) -> None:
    """Tried without catching: the run ends. Tried without deleting: the half-written files stay and fill the disk."""
    expected = whole("ddp", *ALL)
    folder = cut_back(expected, tmp_path / "run", 8)
    run = with_small_files(launch, *TINY, yaml="ddp", folder=folder).succeeded()
    warnings = [line for line in run.stdout.splitlines() if "WARNING" in line]
    assert [line.split(":")[1] for line in warnings] == [f" no checkpoint of step {step}" for step in (12, 14)]
    assert all(line.endswith(f"the last one is {folder}/checkpoints/step_00000008") for line in warnings)
    shard = f"{folder}/checkpoints/tmp_step_00000014/shard-00001-model-00001-of-00001.safetensors"
    assert f"step 14: {shard} cannot be written, Error while serializing: I/O error: File too large" in warnings[-1]
    assert [path.name for path in (folder / "checkpoints").iterdir()] == ["step_00000008"]
    assert_same_run(run, expected)


def test_a_full_disk_at_the_export_is_one_line(launch: Launch, whole: Whole, tmp_path: Path) -> None:
    """And the same command exports later, to where `model` leads. Tried without: a traceback, and a tmp_model."""
    expected = whole("cpu", *ALL)
    folder = cut_back(expected, tmp_path / "run", 14)
    run = with_small_files(launch, *TINY, folder=folder, kilobytes=4000)
    assert run.exit_code == 1
    (line,) = run.messages
    assert line.startswith(f"train.py: {folder}/model cannot be written, Error while serializing: I/O error: File too ")
    assert not [path.name for path in folder.iterdir() if path.name.startswith(("tmp_", "model", "summary"))]
    assert 'train.py", line' not in run.stderr
    (folder / "model").symlink_to(tmp_path / "disk" / "model")
    (tmp_path / "disk" / "model").mkdir(parents=True)
    assert_same_run(launch("cpu", *TINY, folder=folder).succeeded(), expected)
    assert (folder / "model").is_symlink()
    assert [path.name for path in (tmp_path / "disk").iterdir()] == ["model"]


def test_a_run_that_never_could_save_starts_over(launch: Launch, whole: Whole) -> None:
    """Its record goes past three saves. Tried with judging by the record: "its run saved checkpoints, but none are"."""
    run = with_small_files(launch, *TINY, kilobytes=4000)
    assert run.exit_code == 1
    assert run.records[-1]["step"] == 14
    assert run.status == {"status": "unfinished", "checkpoint": None}
    again = launch("cpu", *TINY, folder=run.folder).succeeded()
    assert f"starting over: {run.folder} has no checkpoint yet" in again.stdout
    assert_same_run(again, whole("cpu", *ALL))


def test_a_summary_that_cannot_be_written_leaves_the_run_unfinished(launch: Launch, whole: Whole) -> None:
    """The same command finishes it. Tried with `done` written first: it is said of a run without a summary."""
    full = (
        "import errno\n"
        "from src.tracking import tracker\n"
        "def write_json(file, content):\n"
        "    raise OSError(errno.ENOSPC, 'No space left on device', str(file))\n"
        "tracker.write_json = write_json\n"
    )
    run = launch("cpu", *TINY, before=full)
    assert run.exit_code == 1
    says = "(No space left on device): free some space, then run the same command again"
    assert run.messages == [f"train.py: {run.folder}/summary.json cannot be written {says}"]
    assert run.status == {"status": "unfinished", "checkpoint": f"{run.folder}/checkpoints/step_00000014"}
    again = launch("cpu", *TINY, folder=run.folder).succeeded()
    assert (again.status, again.summary["step"]) == ({"status": "done", "step": 14}, 14)
    assert_same_run(again, whole("cpu", *ALL))


def test_a_file_system_may_refuse_chmod_and_fsync_of_folders(launch: Launch, whole: Whole) -> None:
    """As blobfuse and CIFS do: all is saved. Tried without: no checkpoint, and no model. The
    fsync of a file must not fail: what it holds may be lost. Tried with that allowed: no warning."""
    refuse = (
        "import errno, os, stat\n"
        "fsync = os.fsync\n"
        "def chmod(*_, **__):\n"
        "    raise OSError(errno.EPERM, 'Operation not permitted')\n"
        "def fsync_of_files(descriptor):\n"
        "    if stat.S_ISDIR(os.fstat(descriptor).st_mode):\n"
        "        raise OSError(errno.EINVAL, 'Invalid argument')\n"
        "    fsync(descriptor)\n"
        "os.chmod, os.fchmod, os.fsync = chmod, chmod, fsync_of_files\n"
    )
    run = launch("ddp", *TINY, before=refuse).succeeded()
    assert "WARNING" not in run.stdout
    assert_same_run(run, whole("ddp", *ALL))
    broken = "import errno, os\ndef fsync(_):\n    raise OSError(errno.EIO, 'Input/output error')\n"
    run = launch("cpu", *TINY, "--max_steps=1", before=f"{broken}from src.checkpoint import write; write.sync = fsync")
    assert "WARNING: no checkpoint of step 1: [Errno 5] Input/output error; there is none yet" in run.stdout


def test_a_metric_that_is_not_a_number_is_null_for_readers_and_itself_in_a_checkpoint(launch: Launch) -> None:
    """JSON has no NaN. Tried with json.dumps as it is: `NaN` in all of them."""
    odd = (
        "from src.tasks.mnist import Mnist\n"
        "Mnist.metrics = lambda *_: {'accuracy': float('nan'), 'worst': float('-inf')}\n"
        "tables = Mnist.tables\n"
        "Mnist.tables = lambda *of: tables(*of) | {'odd': [{'value': float('inf')}]}\n"
    )
    run = launch("cpu", *TINY, "--early_stopping.metric=eval/accuracy", "--max_steps=8", before=odd).succeeded()

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is not JSON")

    texts = [*(run.folder / "metrics.jsonl").read_text().splitlines(), (run.folder / "summary.json").read_text()]
    *_, record, summary = (json.loads(text, parse_constant=refuse) for text in texts)
    for found_there in (record, summary):
        assert (found_there["eval/accuracy"], found_there["eval/worst"]) == (None, None)
    assert record["eval/odd"] == [{"value": None}]
    state = json.loads((run.folder / "checkpoints" / "step_00000008" / "state.json").read_text())
    metrics = state["progress"]["evaluations"]["8"]
    assert math.isnan(metrics["eval/accuracy"])
    assert metrics["eval/worst"] == -math.inf


def test_a_record_that_cannot_be_written_ends_the_run_in_one_line(launch: Launch) -> None:
    """It would go on unrecorded. Tried without: a traceback."""
    run = with_small_files(launch, *TINY, kilobytes=4)
    assert run.exit_code == 1
    record = run.folder / "metrics.jsonl"
    says = "(File too large): free some space, then run the same command again"
    assert run.messages == [f"train.py: {record} cannot be written {says}"]
    assert 'train.py", line' not in run.stderr


@pytest.mark.slow
def test_a_save_in_which_a_process_hangs_ends_the_run(tmp_path: Path) -> None:
    """Tried with a warning, as for a full disk: no further checkpoint can be saved, and the run trains on."""
    fault: dict[str, Any] = {"FAULT": "stuck save", "FAULT_STEP": "8", "FAULT_RANK": "1"}
    fault["TORCH_ELASTIC_SHUTDOWN_TIMEOUT"] = "1"
    with Started("ddp", *TINY, "--timeout_minutes=0.1", folder=tmp_path / "run", **fault) as started:
        stuck = started.ended()
    assert stuck.exit_code != 0
    assert "process 0 timed out (timeout_minutes) waiting for another process" in stuck.messages[0]
    assert checkpoints(stuck.folder) == [4]


@pytest.fixture
def judged(whole: Whole) -> Run:
    """Evaluated after each second step, and the two best kept: to be told from the last, those of the highest loss."""
    best = ("--checkpoint.keep_best=2", "--checkpoint.export_best=true", "--checkpoint.mode=max")
    return whole("cpu", *TINY, "--eval_every=2", "--checkpoint.keep_last=1", *best)


def test_the_newest_and_the_best_are_kept_and_the_best_is_exported(judged: Run) -> None:
    """Tried without keeping the best: only step 14 is left; without exporting it: the last one is."""
    losses = {record["step"]: record["eval/loss"] for record in evaluations(judged)}
    second, best = sorted(losses, key=losses.__getitem__)[-2:]
    assert max(best, second) < 12
    assert checkpoints(judged.folder) == sorted([best, second, 14])
    assert judged.summary["eval/loss"] == losses[best]
    saved = whole_tensors(judged.folder / "checkpoints" / f"step_{best:08d}")
    assert_equal(weights(judged), {name: saved[f"model.{name}"] for name in weights(judged)})


def test_the_best_that_is_exported_is_one_that_was_kept(launch: Launch, whole: Whole, tmp_path: Path) -> None:
    """`export_best` is asked for when the run is done, and only the newest were kept."""
    steps = ("--eval_every=2", "--save_every=2", "--checkpoint.mode=max")
    folder = shutil.copytree(whole("cpu", *TINY, *steps).folder, tmp_path / "run")
    again = launch("cpu", *TINY, *steps, "--checkpoint.export_best=true", folder=folder).succeeded()
    losses = {record["step"]: record["eval/loss"] for record in evaluations(again)}
    best, (kept, last) = max(losses, key=losses.__getitem__), checkpoints(folder)
    left = max(kept, last, key=losses.__getitem__)
    assert best < kept
    says = f"exporting the best of the intact checkpoints, {folder}/checkpoints/step_{left:08d}"
    assert says in again.stdout


def test_early_stopping_ends_all_processes_together_and_after_a_resume_too(launch: Launch, tmp_path: Path) -> None:
    """Tried without the reset for another metric: no further step; with one at each resume: it trains past step 8."""
    early = ("metric=eval/loss", "min_delta=100", "patience=3")
    arguments = (*TINY, "--eval_every=2", *(f"--early_stopping.{setting}" for setting in early))
    stopped = launch("ddp", *arguments).succeeded()
    assert stopped.summary["step"] == 8
    assert stopped.status["status"] == "done"
    why = "ended by early stopping, as eval/loss has not improved in 3 evaluations"
    advice = f"{why}; to train longer, raise --early_stopping.patience"
    assert advice in stopped.stdout.splitlines()
    finished = launch("cpu", *arguments, folder=stopped.folder).succeeded()
    assert finished.stdout.splitlines()[-1] == f"{stopped.folder}: this run has finished; {advice}"
    assert found(stopped.folder, *arguments).is_finished
    resumed = launch("cpu", *arguments, folder=cut_back(stopped, tmp_path / "run", 4)).succeeded()
    assert [record["step"] for record in evaluations(resumed)] == [2, 4, 6, 8]
    other = launch("cpu", *arguments, "--early_stopping.metric=eval/accuracy", folder=resumed.folder).succeeded()
    assert [record["step"] for record in evaluations(other)] == [2, 4, 6, 8, 10, 12, 14]  # counted anew


@pytest.mark.parametrize("yaml", ["ddp", slow("fsdp")])
def test_one_process_with_nan_makes_all_skip_the_step_and_count_it(launch: Launch, yaml: str) -> None:
    """It leaves no trace in weights and optimizer. Tried without `accepts`: the weights become NaN."""
    arguments = (*TINY, "--max_steps=6", "--save_every=1", "--checkpoint.keep_last=3")
    run = launch(yaml, *arguments, FAULT="nan", FAULT_RANK="1", FAULT_STEP="5").succeeded()
    assert run.summary["skipped_steps"] == 1
    said = [line for line in run.stdout.splitlines() if line.startswith("WARNING: ")]
    assert said == ["WARNING: steps skipped so far because of non-finite gradients: 1"]
    (skipped,) = (record for record in run.records if record.get("train/loss", 0) is None)
    assert (skipped["step"], skipped["train/grad_norm"], skipped["train/skipped_steps"]) == (5, None, 1)
    before, after = (whole_tensors(run.folder / "checkpoints" / f"step_0000000{step}") for step in (4, 5))
    assert_equal(after, before)


def test_too_many_in_a_row_end_with_one_line_that_names_the_last_checkpoint(launch: Launch) -> None:
    """Tried without the limit: it trains on to the end, and says nothing."""
    run = launch("ddp", *TINY, "--max_bad_steps=3", FAULT="nan forever", FAULT_RANK="1", FAULT_STEP="5")
    assert run.exit_code != 0
    (line,) = run.messages
    assert "3 consecutive steps had non-finite gradients" in line
    assert str(run.folder / "checkpoints" / "step_00000004") in line
    assert checkpoints(run.folder) == [4]
