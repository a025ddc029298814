"""trackio and TensorBoard have what metrics.jsonl has."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from trackio.sqlite_storage import SQLiteStorage

from tests.faults.runs import SHORT, checkpoints, lines, without_times
from tests.launching import Launch, Started

LAST_WORDS = "* Run finished. Uploading logs to Trackio (please wait...)"
"""What trackio says in a run's output."""
BOTH = "--trackers=[trackio, tensorboard]"


@pytest.fixture
def trackio_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr("trackio.sqlite_storage.TRACKIO_DIR", tmp_path / "trackio")
    return tmp_path / "trackio"


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
    assert f"trackio    {name}\n" in run.stdout
    assert [*lines(run, "trackio    trackio show"), *lines(run, "TB         tensorboard --logdir")]
    assert not (folder / "wandb").exists()
    assert [line for line in run.stdout.splitlines() if line.startswith("*")] == [LAST_WORDS]
