"""Processes that die, fail or hang: the run ends by itself, says why, leaves nothing running, and goes on exactly."""

import contextlib
import random
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed import HashStore, ProcessGroupGloo

from src.checkpoint.integrity import problems
from src.config.errors import RunError, UserError
from src.distributed.process import SIGNALS, Signals, exit_codes
from tests.faults.runs import ALL, SHORT, TINY, WORKER, assert_same_run, checkpoints, found
from tests.launching import Launch, Started, Whole, slow

KILLS = 25
OFTEN = ("--global_batch_size=16", "--max_steps=500", "--log_every=1", "--save_every=4", "--eval_every=50")


@pytest.mark.slow
@pytest.mark.parametrize(("yaml", "processes"), [("cpu", 1), ("fsdp", 2)])
def test_killed_25_times_at_any_moment(launch: Launch, tmp_path: Path, yaml: str, processes: int) -> None:
    """In turn at any moment of the start, soon after a step, and when a save has just begun. Tried without: the rename,
    checksums and sizes, truncating the record, deleting what a kill left unfinished (the next save fails)."""
    folder, draw = tmp_path / "run", random.Random(0)
    in_saves = 0
    for kill in range(KILLS):
        left, recorded = unfinished(folder), modified(folder)
        with Started(yaml, *OFTEN, folder=folder, processes=processes) as started:
            if kill % 3 == 0:
                time.sleep(draw.uniform(0, 2))
            elif kill % 3 == 1:
                started.wait_until(lambda: modified(folder) > recorded)  # noqa: B023
                time.sleep(draw.uniform(0, 0.15))
            else:
                started.wait_until(lambda: unfinished(folder) - left)  # noqa: B023
                time.sleep(draw.uniform(0, 0.02))
            assert started.exit_code is None
        in_saves += bool(unfinished(folder) - left)
    run = launch(yaml, *OFTEN, processes=processes, folder=folder).succeeded()
    assert_same_run(run, launch(yaml, *OFTEN, processes=processes).succeeded())
    assert in_saves >= 5


def modified(folder: Path) -> int:
    record = folder / "metrics.jsonl"
    return record.stat().st_mtime_ns if record.exists() else 0


def unfinished(folder: Path) -> set[tuple[str, int]]:
    found = set()
    for path in folder.glob("checkpoints/tmp_*"):
        with contextlib.suppress(FileNotFoundError):
            found.add((path.name, path.stat().st_ino))
    return found


@dataclass(frozen=True)
class Fault:
    """What ends a run in this step, under this strategy, and which checkpoint it leaves as the newest."""

    yaml: str
    kind: str
    step: int
    leaves: int | None
    again: str = ""
    """The strategy that it is resumed under, if another."""
    rank: int = 0
    real: bool = False


FAULTS = {
    "the only process is killed": Fault("cpu", "die", 7, 4),
    "one of two processes is killed": Fault("ddp", "die", 7, 4, rank=1),
    "a crash between writing and publishing": Fault("cpu", "die before publication", 8, 4),
    "a crash in the first save": Fault("ddp", "die before publication", 4, None, again="cpu"),
}
SLOW_FAULTS = {
    "one of two processes of the real launcher is killed": Fault("ddp", "die", 7, 4, rank=1, real=True),
    "one of two sharded processes is killed": Fault("fsdp", "die", 7, 4, rank=1),
}


@pytest.mark.parametrize("name", [*FAULTS, *map(slow, SLOW_FAULTS)])
def test_whatever_kills_a_run_it_resumes_exactly(launch: Launch, whole: Whole, tmp_path: Path, name: str) -> None:
    """With dropout and processes that load data. Tried without: PR_SET_PDEATHSIG (5 seconds more), restoring the random
    numbers and the optimizer, cutting the order and the record off, `unpublished`, `sweep` (a shard too many)."""
    fault, folder = (FAULTS | SLOW_FAULTS)[name], tmp_path / "run"
    planted: dict[str, Any] = {"FAULT": fault.kind, "FAULT_STEP": str(fault.step), "FAULT_RANK": str(fault.rank)}
    with Started(fault.yaml, *TINY, *WORKER, folder=folder, real=fault.real, **planted) as started:
        killed = started.wait_for(f"step {fault.step - 1:6}/").ended(seconds=10)
    assert killed.exit_code != 0
    newest = str(folder / f"checkpoints/step_{fault.leaves:08d}") if fault.leaves else None
    assert killed.status == {"status": "unfinished", "checkpoint": newest}
    assert checkpoints(folder) == ([fault.leaves] if fault.leaves else [])
    assert bool(list(folder.glob("checkpoints/tmp_*"))) == ("publication" in fault.kind)
    again = fault.again or fault.yaml
    resumed = launch(again, *TINY, *WORKER, "--save_every=5", folder=folder).succeeded()
    assert ("starting over" in resumed.stdout) == (newest is None)
    assert "skipped" not in resumed.stdout
    assert_same_run(resumed, whole(again, *ALL))
    assert {path.name for path in (folder / "checkpoints").iterdir()} == {"step_00000010", "step_00000014"}
    assert not any(problem for step in (10, 14) for problem in problems(folder / f"checkpoints/step_{step:08d}"))


@pytest.mark.parametrize("real", [False, slow(True)])
def test_of_an_exception_on_one_process_the_first_thing_shown_is_the_cause(launch: Launch, real: bool) -> None:
    """And the only one. Tried without the grace in `leave_it_to_others`: the other's lost connection follows."""
    failed = launch("ddp", *TINY, real=real, FAULT="raise", FAULT_RANK="1", FAULT_STEP="7")
    assert failed.exit_code != 0
    causes = [line for line in failed.stderr.splitlines() if "Error:" in line]
    assert causes[0].endswith("RuntimeError: the root cause")
    assert "gloo" not in failed.stderr
    assert checkpoints(failed.folder) == [4]


class Died(BaseException):
    """In place of the process."""


def die(_: Signals) -> None:
    raise Died


@pytest.mark.parametrize(
    ("error", "rank", "told", "says"),
    [
        (RuntimeError("[gloo] closed by peer"), "0", "before", None),
        (RuntimeError("the root cause"), "1", "before", ""),
        (UserError("a mistake that all share"), "1", "late", None),
        (UserError("a mistake that all share"), "0", "before", "train.py: a mistake that all share\n"),
        (UserError("a mistake of its own"), "1", "never", "train.py: a mistake of its own [process 1]\n"),
        (RunError("its disk is gone"), "1", "never", "train.py: its disk is gone [process 1]\n"),
    ],
)
def test_a_process_says_what_no_other_has_said(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], error: Exception, rank: str, told: str,
    says: str | None,
) -> None:  # fmt: skip
    """Tried without `die`: it is said twice; with a RunError taken to be all processes': one ends without a word."""
    monkeypatch.setattr(SIGNALS, "name", "SIGTERM" if told == "before" else None)
    monkeypatch.setattr("time.sleep", lambda _: setattr(SIGNALS, "name", None if told == "never" else "SIGTERM"))
    monkeypatch.setattr(Signals, "die", die)
    for name in ("RANK", "LOCAL_RANK"):
        monkeypatch.setenv(name, rank)
    with pytest.raises(Died if says is None else (RuntimeError, SystemExit)), exit_codes():
        raise error
    assert capsys.readouterr().err == (says or "")


def test_whichever_exchange_times_out_first_the_one_that_is_waited_for_says_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The first closes the connection, and gloo says something else of the others. Tried without: a traceback."""
    monkeypatch.setattr("src.distributed.process.GRACE_SECONDS", 0)
    store, timeout = HashStore(), timedelta(seconds=0.5)
    with ThreadPoolExecutor() as pool:
        groups: list[Any] = [*pool.map(lambda rank: ProcessGroupGloo(store, rank, 2, timeout), range(2))]
    exchanges = [groups[0].allreduce([torch.zeros(1000)]) for _ in range(8)]
    said = []
    for exchange in exchanges:
        with pytest.raises(RuntimeError) as error, exit_codes():
            exchange.wait()
        said.append(str(error.value))
    assert "Application timeout caused pair closure" in said
    hangs = "train.py: process 0 timed out (timeout_minutes) waiting for another process"
    assert capsys.readouterr().err.splitlines() == [hangs] * len(exchanges)


def test_a_process_that_hangs_ends_the_run_by_timeout_minutes(tmp_path: Path) -> None:
    """After 3 seconds here. Tried without passing the timeout on: it hangs for half an hour."""
    before = "import src.distributed.process; src.distributed.process.GRACE_SECONDS = 1"
    fault: dict[str, Any] = {"FAULT": "hang", "FAULT_RANK": "1", "FAULT_STEP": "7"}
    fault["TORCH_ELASTIC_SHUTDOWN_TIMEOUT"] = "1"
    with Started("ddp", *TINY, "--timeout_minutes=0.05", folder=tmp_path / "run", before=before, **fault) as started:
        hung = started.wait_for("step      6/").ended(seconds=25)
    assert hung.exit_code != 0
    assert hung.messages == ["train.py: process 0 timed out (timeout_minutes) waiting for another process"]
    assert checkpoints(hung.folder) == [4]


def test_a_killed_loading_process_is_named(tmp_path: Path) -> None:
    """By torch, or while it hands over a batch by _name_dead_workers; without that, it failed once in 15 times."""
    with Started("cpu", *SHORT, "--num_workers=1", folder=tmp_path / "run") as started:
        started.wait_for("step      9/")
        (trainer,) = started.trainers
        for loader in trainer.children():
            loader.kill()
        killed = started.ended()
    assert killed.exit_code != 0
    assert "DataLoader worker" in killed.stdout
    assert checkpoints(killed.folder) == [8]


def test_a_crash_while_old_checkpoints_are_deleted(launch: Launch, tmp_path: Path) -> None:
    """Tried with deleting before publishing: there is none left to go on from."""
    folder, arguments = tmp_path / "run", (*TINY, "--checkpoint.keep_last=1")
    launch("cpu", *arguments, folder=folder, FAULT="die in rotation")
    assert checkpoints(folder) == [8]
    assert not any(problems(folder / "checkpoints" / "step_00000008"))
    assert found(folder).progress.step == 8
