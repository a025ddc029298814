"""trackio and TensorBoard have what metrics.jsonl has, and whatever happens to them, the training goes on."""

import re
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from trackio.sqlite_storage import SQLiteStorage

from src.checkpoint.folder import run_settings
from src.config.config import config_from
from src.tasks import TASKS
from tests.faults.runs import SHORT, checkpoints, lines, without_times
from tests.launching import Launch, Started, mistakes

LAST_WORDS = "* Run finished. Uploading logs to Trackio (please wait...)"
"""What trackio says in a run's output."""
BOTH = "--trackers=[trackio, tensorboard]"
SCRIPT = """
import sys, time
from pathlib import Path
from accelerate import PartialState
from types import SimpleNamespace
from src.tracking import guard
from src.checkpoint.folder import run_settings
from src.tracking import accelerate_trackers

PartialState(cpu=True)
guard.HANG_SECONDS = guard.FINISH_SECONDS = 1.0
config = run_settings(["--task.source=digits", "--output_dir=run", "--trackers=[trackio,tensorboard]"])
require_room = guard.require_room
accelerate_trackers.describe = lambda run: {"run_name": "x"}

def full(folder):
    raise OSError(28, "No space left on device")

def crash(*_, **__):
    raise RuntimeError("a bug of theirs")

def log(guarded, step):
    guarded.tell(guarded.recorder.log, {"step": step, "train/loss": 0.5}, {"table": [{"a": "b"}]})
    time.sleep(0.2)

for fault in ("none", "hangs", "hangs at the finish", "a full disk", "raises"):
    folder = Path("run", fault)
    folder.mkdir(parents=True)
    config.output_dir = str(folder)
    run = SimpleNamespace(config=config, progress=SimpleNamespace(step=0))
    for logger in accelerate_trackers.start_trackers(run, print, "x"):
        print("CASE", fault, logger.recorder.title, logger.where, sep="|")
        log(logger, 1)
        tracker = logger.recorder.tracker
        if fault == "a full disk":
            guard.require_room = full
        if fault != "none":
            name = "finish" if "finish" in fault else "log"
            setattr(tracker, name, crash if fault == "raises" else lambda *_, **__: time.sleep(10_000))
        log(logger, 2)
        time.sleep(1.2 * (fault == "hangs"))
        log(logger, 3)
        logger.finish(0)
        guard.require_room = require_room
        print("failure:", logger.failure, logger.closing_line() is None, sep="|")
"""


@pytest.fixture
def trackio_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr("trackio.sqlite_storage.TRACKIO_DIR", tmp_path / "trackio")
    return tmp_path / "trackio"


def test_a_tracker_that_hangs_raises_or_fills_the_disk(launch: Launch, tmp_path: Path) -> None:
    """It is told once, the run goes on, and the process ends. Tried without the thread: it waits forever; without
    looking for room: nobody hears of the lost records."""
    (tmp_path / "script.py").write_text(SCRIPT)
    script, home = str(tmp_path / "script.py"), str(tmp_path / "trackio")
    done = launch("cpu", script=script, cwd=tmp_path, TRACKIO_DIR=home).succeeded()
    why = {
        "none": None,
        "hangs": "it has not answered for 1 seconds",
        "hangs at the finish": "it has not answered for 2 seconds",
        "a full disk": r"\[Errno 28\] No space left on device",
        "raises": "a bug of theirs",
    }
    cases = done.stdout.split("CASE|")[1:]
    assert [case.split("|")[:2] for case in cases] == [[f, t] for f in why for t in ("trackio", "TB")]
    for case in cases:
        fault, title, *_ = case.split("|")
        assert re.search(rf"failure:\|{why[fault]}\|{why[fault] is not None}\n", case)
        said = [line for line in case.splitlines() if line.startswith("WARNING")]
        assert len(said) == (why[fault] is not None)
        for line in said:
            assert re.fullmatch(
                rf"WARNING: {title} failed \({why[fault]}\): the run goes on, recorded in metrics\.jsonl", line
            )
    assert done.stderr == ""


def test_they_have_each_record_over_a_kill_and_a_resume(launch: Launch, tmp_path: Path, trackio_folder: Path) -> None:
    """Value by value, in one run each; trackio with the settings, but perhaps without the last records
    of the killed session. TensorBoard keeps single precision. Tried without `purge_step`: it has steps twice."""
    arguments, folder = (*SHORT, BOTH), tmp_path / "run"
    home: dict[str, Any] = {"TRACKIO_DIR": str(trackio_folder)}
    with Started("cpu", *arguments, folder=folder, **home) as started:
        started.wait_for("step     12/").wait_until(lambda: 8 in checkpoints(folder)).kill_all()
    run = launch("cpu", *arguments, folder=folder, **home).succeeded()
    (name,) = SQLiteStorage.get_runs("accelerate-template")
    logs = SQLiteStorage.get_logs("accelerate-template", name)
    logs = [{n: v for n, v in log.items() if n != "timestamp"} for log in logs]
    records = [{n: v for n, v in record.items() if not isinstance(v, list)} for record in run.records]  # no tables
    found, expected = without_times(logs), without_times(records)
    assert [record for record in found if record not in expected] == []
    assert [record for record in expected if record not in found and record["step"] > 8] == []
    settings = SQLiteStorage.get_run_config("accelerate-template", name)
    assert settings
    assert settings["task"]["source"] == "digits"
    events = EventAccumulator(str(folder / "tensorboard")).Reload()
    for tag in events.Tags()["scalars"]:
        shown = [(event.step, event.value) for event in events.Scalars(tag)]
        assert shown == [(r["step"], float(np.float32(r[tag]))) for r in records if tag in r]
    assert set(events.Tags()["scalars"]) == {n for r in records for n in r} - {"step"}
    assert f"trackio    {name} in {trackio_folder}" in run.stdout
    assert [*lines(run, "trackio    trackio show"), *lines(run, "TB         tensorboard --logdir")]
    assert not (folder / "wandb").exists()
    assert [line for line in run.stdout.splitlines() if line.startswith("*")] == [LAST_WORDS]


def test_a_tracker_that_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is refused, but a run that had it can be used. Tried with it among the settings read: that is refused too."""
    saved = run_settings(["--task.source=digits", "--trackers=[trackio]"]).model_dump(mode="json")
    monkeypatch.setattr("src.config.trackers.find_spec", lambda name: None if name == "trackio" else find_spec(name))
    assert mistakes("--trackers=[wandb, trackio]") == [
        "--trackers=[wandb, trackio]: not installed: pip install trackio"
    ]
    assert config_from(saved, TASKS).task.name == "mnist"
