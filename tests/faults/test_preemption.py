"""A run that is told to end saves, says so in status.json, leaves no process behind, and goes on exactly."""

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
"""Too long to end by itself in a test, never saved but when told to, and with a process that loads data."""


def assert_preempted(run: Run, at_least: int = 5) -> dict[str, Any]:
    """Returns: status.json, whose checkpoint is there."""
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
def test_a_signal_to_the_launcher(tmp_path: Path, yaml: str, number: signal.Signals, real: bool) -> None:
    """Tried without: handlers, looking after the launcher (they train on), ignore_signals_in_worker (loaders die)."""
    with Started(yaml, *LONG, folder=tmp_path / "run", real=real) as started:
        assert_preempted(started.wait_for("step      5/").send(number).ended(seconds=20))


def test_a_terminal_that_closes(tmp_path: Path) -> None:
    """Tried without a handler of SIGHUP: "unfinished"; without dropping what nobody reads: a traceback."""
    folder, (ours, theirs) = tmp_path / "run", pty.openpty()
    attached = WRITES_TO.format(f"os.open({os.ttyname(theirs)!r}, os.O_RDWR | os.O_NOCTTY)")
    with Started("cpu", *LONG, folder=folder, before=attached) as started:
        record = folder / "metrics.jsonl"
        started.wait_until(lambda: record.exists() and record.read_bytes().count(b"\n") >= 5)
        os.close(ours)
        os.close(theirs)
        logged = record.stat().st_size
        started.wait_until(lambda: record.stat().st_size > 2 * logged)  # it goes on without a reader
        status = assert_preempted(started.send(signal.SIGHUP).ended())
    assert status["reason"] == "SIGHUP"


@pytest.mark.parametrize(("number", "status"), [(signal.SIGHUP, "done"), (signal.SIGTERM, "preempted")])
def test_of_ignored_signals_only_sighup_stays_so(tmp_path: Path, number: signal.Signals, status: str) -> None:
    """As nohup and Slurm's launcher ignore them. Tried with handlers in any case, and with none for ignored signals."""
    ignored = f"import signal; signal.signal({int(number)}, signal.SIG_IGN)"
    with Started("cpu", *TINY, folder=tmp_path / "run", before=ignored) as started:
        started.wait_for("step      2/").send(number, to=started.trainers[0])
        assert started.ended().status["status"] == status


def test_in_an_evaluation_it_does_not_wait_for_the_end_of_it(whole: Whole, tmp_path: Path) -> None:
    """Resumed by the command in status.json, it is made again. Tried without asking in `evaluate`: 23 seconds."""
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


def test_a_signal_to_one_process_during_a_save(launch: Launch, whole: Whole, tmp_path: Path) -> None:
    """Tried without the sum over processes: the others wait; without waiting for the save under way: it is missing."""
    with Started("ddp", *TINY, folder=tmp_path / "run", FAULT="slow save", FAULT_STEP="4") as started:
        started.wait_for("step      5/").send(signal.SIGTERM, to=started.trainers[1])
        stopped = started.ended()
    assert (stopped.exit_code, stopped.stderr) == (0, "")
    step = assert_preempted(stopped)["step"]
    assert checkpoints(stopped.folder) == [4, int(step)]
    assert_same_run(launch("ddp", *TINY, folder=stopped.folder).succeeded(), whole("ddp", *ALL))


def test_a_second_interrupt_ends_at_once(tmp_path: Path) -> None:
    """Tried without: it waits for a save that never ends."""
    fault: dict[str, Any] = {"FAULT": "stuck save", "FAULT_STEP": "6"}
    with Started("ddp", *LONG, "--save_every=6", folder=tmp_path / "run", **fault) as started:
        started.wait_for("step      6/")
        trainers = started.trainers
        for seconds in (2.5, 0):  # a second one within a second counts as the first
            for trainer in trainers:
                started.send(signal.SIGINT, to=trainer)
            time.sleep(seconds)
        _, alive = psutil.wait_procs(trainers, timeout=30)
        assert not alive
        run = started.ended()
    assert run.exit_code != 0
    assert run.status == {"status": "unfinished", "checkpoint": None}


def test_max_hours_ends_the_same_way(launch: Launch) -> None:
    """Whatever the wall clock says, and the boot time, from which psutil works out when a process was created. Tried
    without the deadline: it trains on; by psutil: a traceback."""
    jumps = "import psutil, time; del psutil.Process.create_time; real = time.time; time.time = lambda: real() - 1e8"
    limited = launch("ddp", *LONG, "--max_hours=0.0005", before=jumps).succeeded()  # 1.8 seconds
    assert assert_preempted(limited, at_least=1)["reason"] == "max_hours=0.0005"
    assert limited.stderr == ""


@pytest.mark.parametrize(
    ("phase", "number"),
    [
        ("data", signal.SIGUSR1), slow("data", signal.SIGTERM),
        slow("imports", signal.SIGUSR1), slow("imports", signal.SIGTERM),
    ],
)  # fmt: skip
def test_a_signal_during_the_start(tmp_path: Path, phase: str, number: signal.Signals) -> None:
    """The next start begins. Tried with handlers from the first step on: exit code 138, and no status.json."""
    folder = tmp_path / "run"
    fault: dict[str, Any] = {"FAULT": "slow data"} if phase == "data" else {}
    with Started("cpu", *TINY, folder=folder, real=phase == "imports", **fault) as started:
        (trainer,) = started.wait_for_handlers(number)
        if phase == "data":
            started.wait_for("building the data")
        stopped = started.send(number, to=trainer).ended(seconds=20)
    assert stopped.exit_code == 0
    told = {"status": "preempted", "reason": number.name, "step": 0, "checkpoint": None}
    assert told.items() <= stopped.status.items()
    assert "stopped before the first step by" in stopped.stdout
    assert replace(found(folder), command="") == ResumePoint()


@pytest.mark.parametrize("phase", ["they meet", "data are built"])
def test_a_peer_that_is_lost_at_the_start_holds_up_no_signal(tmp_path: Path, phase: str) -> None:
    """The main thread is in C++, where Python's handlers wait. Tried with those: SIGKILL after 30 seconds."""
    with Started("cpu", *TINY, folder=tmp_path / "run", FAULT=f"lost while {phase}") as started:
        stopped = started.wait_for("waiting for others").send(signal.SIGTERM).ended(seconds=20)
    if phase == "they meet":  # which output folder is its own is not known yet
        assert (stopped.exit_code, stopped.folder.exists()) == (128 + signal.SIGTERM, False)
    else:
        assert (stopped.exit_code, stopped.status["status"]) == (0, "preempted")


def test_a_signal_to_the_launcher_during_a_resume(whole: Whole, tmp_path: Path) -> None:
    """While the other process waits for the data, where it sees no signal. Tried without: it shows a traceback."""
    folder = cut_back(whole("ddp", *ALL), tmp_path / "run", 12)
    with Started("ddp", *TINY, folder=folder, FAULT="slow data") as started:
        started.wait_for_handlers(signal.SIGTERM, processes=2)
        started.wait_for("building the data")
        time.sleep(1)  # the other one has come to its wait
        stopped = started.send(signal.SIGTERM).ended(seconds=15)
    assert_preempted(stopped, at_least=12)
    assert 'train.py", line' not in stopped.stdout


@pytest.mark.parametrize("phase", ["data", slow("imports")])
def test_a_launcher_that_is_gone_leaves_no_orphan(tmp_path: Path, phase: str) -> None:
    """Tried with watching the launcher only when all is built: its process trains on to the end."""
    fault: dict[str, Any] = {"FAULT": "slow data"} if phase == "data" else {}
    with Started("cpu", *LONG, folder=tmp_path / "run", real=phase == "imports", **fault) as started:
        started.wait_for_handlers(signal.SIGTERM)
        if phase == "data":
            started.wait_for("building the data")
        run = started.send(signal.SIGKILL).ended()
    assert not (run.folder / "metrics.jsonl").exists()
