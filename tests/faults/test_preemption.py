"""A run that is asked to stop saves, says so in status.json, leaves no process behind, and resumes exactly."""

import os
import pty
import shlex
import signal
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest

from src.distributed.process import STOP_SIGNALS
from src.training.state import ResumePoint
from tests.faults.runs import ALL, TINY, WORKER, assert_same_run, checkpoints, cut_back, found
from tests.launching import WRITES_TO, Launch, Run, Started, Whole, launched, slow

LONG = ("--epochs=100", "--log_every=1", "--save_every=100000", *WORKER)
"""A run that no test waits for, saves only when asked to stop, and has a process that loads data."""


def assert_preempted(run: Run, at_least: int = 5) -> dict[str, Any]:
    """Return status.json, whose checkpoint is there."""
    status = run.status
    assert status["status"] == "preempted", run.stdout
    assert status["step"] >= at_least
    assert status["checkpoint"] == str(run.folder / "checkpoints" / f"step_{status['step']:08d}")
    assert checkpoints(run.folder)[-1] == status["step"]
    assert "WARNING" not in run.stdout
    assert not (run.folder / "summary.json").exists()
    return status


@pytest.mark.parametrize(
    ("yaml", "number", "real"),
    [
        ("fsdp", signal.SIGUSR1, True), ("ddp", signal.SIGINT, False), ("cpu", signal.SIGHUP, False),
        *(slow(yaml, number, True) for yaml in ("cpu", "ddp") for number in STOP_SIGNALS),
    ],
)  # fmt: skip
def test_a_signal_to_the_launcher_saves(tmp_path: Path, yaml: str, number: signal.Signals, real: bool) -> None:
    with Started(yaml, *LONG, folder=tmp_path / "run", real=real) as started:
        assert_preempted(started.wait_for("step      5/").send(number).ended(seconds=20))


def test_a_run_whose_terminal_closes_saves(tmp_path: Path) -> None:
    folder, (ours, theirs) = tmp_path / "run", pty.openpty()
    attached = WRITES_TO.format(f"os.open({os.ttyname(theirs)!r}, os.O_RDWR | os.O_NOCTTY)")
    with Started("cpu", *LONG, folder=folder, before=attached) as started:
        log = folder / "metrics.jsonl"
        started.wait_until(lambda: log.exists() and log.read_bytes().count(b"\n") >= 5)
        os.close(ours)
        os.close(theirs)
        size = log.stat().st_size
        started.wait_until(lambda: log.stat().st_size > 2 * size)  # it trains on without a reader
        assert assert_preempted(started.send(signal.SIGHUP).ended())["reason"] == "SIGHUP"


@pytest.mark.parametrize(("number", "status"), [(signal.SIGHUP, "done"), (signal.SIGTERM, "preempted")])
def test_of_ignored_signals_only_sighup_stays_ignored(tmp_path: Path, number: signal.Signals, status: str) -> None:
    """As nohup and Slurm's launcher ignore them."""
    ignored = f"import signal; signal.signal({int(number)}, signal.SIG_IGN)"
    with Started("cpu", *TINY, folder=tmp_path / "run", before=ignored) as started:
        started.wait_for("step      2/").send(number, to=started.trainers[0])
        assert started.ended().status["status"] == status


def test_a_signal_in_an_evaluation_aborts_it_and_resuming_repeats_it(whole: Whole, tmp_path: Path) -> None:
    """The evaluation would take 23 seconds. The command in status.json resumes the run."""
    with Started("ddp", *TINY, folder=tmp_path / "run", FAULT="slow evaluation") as started:
        started.wait_for("step      8/")
        asked = time.monotonic()
        stopped = started.send(signal.SIGTERM).ended()
        assert time.monotonic() - asked < 14
    status = assert_preempted(stopped)
    assert status["step"] == 8
    command = shlex.split(status["command"])
    assert (Path(command[0]).name, command[1]) == ("accelerate", "launch")
    again = launched("ddp", words=command[2:], folder=stopped.folder).succeeded()
    assert_same_run(again, whole("ddp", *ALL))
    assert again.status == {"status": "done", "step": 14}


def test_a_signal_to_one_process_in_a_save_stops_all(launch: Launch, whole: Whole, tmp_path: Path) -> None:
    with Started("ddp", *TINY, folder=tmp_path / "run", FAULT="slow save", FAULT_STEP="4") as started:
        started.wait_for("step      5/").send(signal.SIGTERM, to=started.trainers[1])
        stopped = started.ended()
    assert (stopped.exit_code, stopped.stderr) == (0, "")
    step = assert_preempted(stopped)["step"]
    assert checkpoints(stopped.folder) == [4, int(step)]
    assert_same_run(launch("ddp", *TINY, folder=stopped.folder).succeeded(), whole("ddp", *ALL))


def test_a_second_interrupt_ends_a_run_at_once(tmp_path: Path) -> None:
    """Though a save hangs. A second one within a second counts as the first."""
    folder = tmp_path / "run"
    with Started("ddp", *LONG, "--save_every=6", folder=folder, FAULT="stuck save", FAULT_STEP="6") as started:
        trainers = started.wait_for("step      6/").trainers
        for seconds in (2.5, 0):
            for trainer in trainers:
                started.send(signal.SIGINT, to=trainer)
            time.sleep(seconds)
        assert psutil.wait_procs(trainers, timeout=30)[1] == [], "still alive"
        run = started.ended()
    assert run.exit_code != 0
    assert run.status == {"status": "unfinished", "checkpoint": None}


def test_max_hours_saves_whatever_the_wall_clock_does(launch: Launch) -> None:
    """Here it jumps by years, as does the boot time, from which psutil works out when a process was created."""
    jumps = "import psutil, time; del psutil.Process.create_time; real = time.time; time.time = lambda: real() - 1e8"
    limited = launch("ddp", *LONG, "--max_hours=0.0005", before=jumps).succeeded()  # 1.8 seconds
    assert assert_preempted(limited, at_least=1)["reason"] == "max_hours=0.0005"
    assert limited.stderr == ""


@pytest.mark.parametrize("real", [False, slow(True)])
@pytest.mark.parametrize("number", [signal.SIGUSR1, slow(signal.SIGTERM)])
def test_a_signal_during_the_start_ends_it_at_once(tmp_path: Path, number: signal.Signals, real: bool) -> None:
    """While the data is built or, under the real launcher, during the imports. The next start begins anew."""
    folder = tmp_path / "run"
    fault: dict[str, Any] = {} if real else {"FAULT": "slow data"}
    with Started("cpu", *TINY, folder=folder, real=real, **fault) as started:
        (trainer,) = started.wait_for_handlers(number)
        started.wait_for("" if real else "building the data")
        stopped = started.send(number, to=trainer).ended(seconds=20)
    assert stopped.exit_code == 0
    expected = {"status": "preempted", "reason": number.name, "step": 0, "checkpoint": None}
    assert expected.items() <= stopped.status.items()
    assert "stopped before the first step by" in stopped.stdout
    assert replace(found(folder), command="") == ResumePoint()


@pytest.mark.parametrize("phase", ["they meet", "data are built"])
def test_a_signal_ends_a_resume_that_waits_for_a_lost_peer(whole: Whole, tmp_path: Path, phase: str) -> None:
    """Its main thread is in C++, where Python's handlers don't run."""
    folder = cut_back(whole("cpu", *ALL), tmp_path / "run", 12)
    with Started("cpu", *TINY, folder=folder, FAULT=f"lost while {phase}") as started:
        stopped = started.wait_for("waiting for others").send(signal.SIGTERM).ended(seconds=20)
    assert 'train.py", line' not in stopped.stdout, "a traceback"
    if phase == "data are built":
        assert assert_preempted(stopped)["step"] == 12
    else:  # before it is known that the output folder is its own
        assert (stopped.exit_code, (folder / "status.json").exists()) == (128 + signal.SIGTERM, False)


@pytest.mark.parametrize("real", [False, slow(True)])
def test_a_launcher_that_dies_during_the_start_leaves_no_orphan(tmp_path: Path, real: bool) -> None:
    fault: dict[str, Any] = {} if real else {"FAULT": "slow data"}
    with Started("cpu", *LONG, folder=tmp_path / "run", real=real, **fault) as started:
        started.wait_for_handlers(signal.SIGTERM)
        started.wait_for("" if real else "building the data")
        run = started.send(signal.SIGKILL).ended()
    assert not (run.folder / "metrics.jsonl").exists()
