"""Processes that die, fail or hang: the run ends by itself, says why, leaves nothing running, and resumes exactly."""

import contextlib
import random
import re
import time
from pathlib import Path
from typing import Any

import pytest

from src.checkpoint.integrity import problems
from src.config.errors import RunError, UserError
from src.distributed.process import SIGNALS, Signals, exit_codes
from tests.faults.runs import ALL, SHORT, TINY, WORKER, assert_same_run, checkpoints, found
from tests.launching import Launch, Started, Whole, slow

OFTEN = ("--global_batch_size=16", "--max_steps=500", "--log_every=1", "--save_every=4", "--eval_every=50")


@pytest.mark.slow
@pytest.mark.parametrize(("yaml", "processes"), [("cpu", 1), ("fsdp", 2)])
def test_killed_25_times_it_resumes_exactly(launch: Launch, tmp_path: Path, yaml: str, processes: int) -> None:
    """In turn: at any moment of the start, soon after a step, and when a save has just begun."""
    folder, draw = tmp_path / "run", random.Random(0)
    log, kills_in_saves = folder / "metrics.jsonl", 0

    def logged() -> int:
        return log.stat().st_mtime_ns if log.exists() else 0

    def saves() -> set[tuple[str, int]]:
        """Return the saves under way, and those that kills have left behind."""
        begun = set()
        for path in folder.glob("checkpoints/tmp_*"):
            with contextlib.suppress(FileNotFoundError):
                begun.add((path.name, path.stat().st_ino))
        return begun

    for kill in range(25):
        left, before = saves(), logged()
        with Started(yaml, *OFTEN, folder=folder, processes=processes) as started:
            if kill % 3 == 1:
                started.wait_until(lambda: logged() > before)  # noqa: B023
            elif kill % 3 == 2:
                started.wait_until(lambda: saves() - left)  # noqa: B023
            time.sleep(draw.uniform(0, (2, 0.15, 0.02)[kill % 3]))
            assert started.exit_code is None
        kills_in_saves += bool(saves() - left)
    run = launch(yaml, *OFTEN, processes=processes, folder=folder).succeeded()
    assert_same_run(run, launch(yaml, *OFTEN, processes=processes).succeeded())
    assert kills_in_saves >= 5


@pytest.mark.parametrize(
    ("yaml", "real", "fault", "step", "rank", "leaves", "again"),
    [
        ("cpu", False, "die", 7, 0, 4, "cpu"),
        ("ddp", False, "die", 7, 1, 4, "ddp"),
        slow("ddp", True, "die", 7, 1, 4, "ddp"),
        slow("fsdp", False, "die", 7, 1, 4, "fsdp"),
        ("cpu", False, "die before publication", 8, 0, 4, "cpu"),
        ("ddp", False, "die before publication", 4, 0, None, "cpu"),  # in the first save
    ],
)
def test_whatever_kills_a_run_it_resumes_exactly(
    launch: Launch, whole: Whole, tmp_path: Path, yaml: str, real: bool, fault: str, step: int, rank: int,
    leaves: int | None, again: str,
) -> None:  # fmt: skip
    """With dropout and processes that load data. `leaves`: the newest checkpoint; `again`: the yaml to resume under."""
    folder = tmp_path / "run"
    planted: dict[str, Any] = {"FAULT": fault, "FAULT_STEP": str(step), "FAULT_RANK": str(rank)}
    with Started(yaml, *TINY, *WORKER, folder=folder, real=real, **planted) as started:
        killed = started.wait_for(f"step {step - 1:6}/").ended(seconds=10)
    assert killed.exit_code != 0
    newest = f"{folder}/checkpoints/step_{leaves:08d}" if leaves else None
    assert killed.status == {"status": "unfinished", "checkpoint": newest}
    assert checkpoints(folder) == ([leaves] if leaves else [])
    assert any(folder.glob("checkpoints/tmp_*")) == ("publication" in fault)
    resumed = launch(again, *TINY, *WORKER, "--save_every=5", folder=folder).succeeded()
    assert ("starting over" in resumed.stdout) == (newest is None)
    assert "skipped" not in resumed.stdout
    assert_same_run(resumed, whole(again, *ALL))
    kept = list((folder / "checkpoints").iterdir())
    assert {path.name for path in kept} == {"step_00000010", "step_00000014"}
    assert not [problem for checkpoint in kept for problem in problems(checkpoint)]


@pytest.mark.parametrize("real", [False, slow(True)])
def test_an_exception_on_one_process_is_all_that_is_shown(launch: Launch, real: bool) -> None:
    failed = launch("ddp", *TINY, real=real, FAULT="raise", FAULT_RANK="1", FAULT_STEP="7")
    assert failed.exit_code != 0
    causes = [line for line in failed.stderr.splitlines() if "Error:" in line]
    assert causes[0].endswith("RuntimeError: the root cause")
    assert "gloo" not in failed.stderr, "the other's lost connection"
    assert checkpoints(failed.folder) == [4]


@pytest.mark.parametrize(
    ("error", "rank", "signalled", "says"),
    [
        (RuntimeError("[gloo] closed by peer"), "0", "before", None),
        (RuntimeError("the root cause"), "1", "before", ""),  # the interpreter prints its traceback
        (UserError("a mistake that all share"), "1", "late", None),
        (UserError("a mistake that all share"), "0", "before", "train.py: a mistake that all share\n"),
        (UserError("a mistake of its own"), "1", "never", "train.py: a mistake of its own [process 1]\n"),
        (RunError("its disk is gone"), "1", "never", "train.py: its disk is gone [process 1]\n"),
    ],
)
def test_a_process_reports_what_no_other_has_reported(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], error: Exception, rank: str, signalled: str,
    says: str | None,
) -> None:  # fmt: skip
    """The launcher signals a process when another one has failed, and it then ends silently (None)."""
    monkeypatch.setattr(SIGNALS, "name", "SIGTERM" if signalled == "before" else None)
    monkeypatch.setattr("time.sleep", lambda _: setattr(SIGNALS, "name", None if signalled == "never" else "SIGTERM"))
    monkeypatch.setattr(Signals, "die", lambda _: pytest.exit("silently"))
    for name in ("RANK", "LOCAL_RANK"):
        monkeypatch.setenv(name, rank)
    with pytest.raises(pytest.exit.Exception if says is None else (RuntimeError, SystemExit)), exit_codes():
        raise error
    assert capsys.readouterr().err == (says or "")


@pytest.mark.parametrize(("yaml", "processes"), [("ddp", 2), slow("hsdp", 4)])
def test_a_process_that_hangs_ends_the_run_by_timeout_minutes(tmp_path: Path, yaml: str, processes: int) -> None:
    """After 3 seconds here, but not in the first step, in which it may be compiling."""
    before = (
        "import itertools, os, time, src.distributed.process as process\nprocess.GRACE_SECONDS = 1\n"
        "from src.tasks.mnist import Mnist\nloss, calls = Mnist.loss, itertools.count()\n"
        "is_slow = os.environ['RANK'] == '1'\n"
        "Mnist.loss = lambda *of: (time.sleep(5 * (is_slow and not next(calls))), loss(*of))[1]\n"
    )
    fault: dict[str, Any] = {"FAULT": "hang", "FAULT_RANK": "1", "FAULT_STEP": "7", "processes": processes}
    fault["TORCH_ELASTIC_SHUTDOWN_TIMEOUT"] = "1"
    with Started(yaml, *TINY, "--timeout_minutes=0.05", folder=tmp_path / "run", before=before, **fault) as started:
        hung = started.wait_for("step      6/").ended(seconds=25)
    assert hung.exit_code != 0
    says = re.compile(r"train\.py: process [023] timed out \(timeout_minutes\) waiting for another process")
    assert hung.messages  # of some of those that waited
    assert all(map(says.fullmatch, hung.messages))
    assert checkpoints(hung.folder) == [4]


def test_a_killed_data_worker_is_named(tmp_path: Path) -> None:
    with Started("cpu", *SHORT, *WORKER, folder=tmp_path / "run") as started:
        started.wait_for("step      9/")
        (trainer,) = started.trainers
        for worker in trainer.children():
            worker.kill()
        killed = started.ended()
    assert killed.exit_code != 0
    assert "DataLoader worker" in killed.stdout
    assert checkpoints(killed.folder) == [8]


def test_a_crash_while_old_checkpoints_are_deleted_loses_none(launch: Launch, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    launch("cpu", *TINY, "--checkpoint.keep_last=1", folder=folder, FAULT="die in rotation")
    assert checkpoints(folder) == [8]
    assert not any(problems(folder / "checkpoints" / "step_00000008"))
    assert found(folder).progress.step == 8
