"""trackio and TensorBoard have what metrics.jsonl has."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from trackio.sqlite_storage import SQLiteStorage

from tests.faults.runs import SHORT, checkpoints, lines, without_times
from tests.launching import Launch, Started

"""What trackio says in a run's output."""


def test_they_have_each_record_over_a_kill_and_a_resume(
    launch: Launch, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Value by value, in one run each; trackio with the settings, but perhaps without the last records
    of the killed session. TensorBoard keeps single precision. Tried without `purge_step`: it has steps twice."""
    monkeypatch.setattr("trackio.sqlite_storage.TRACKIO_DIR", tmp_path / "trackio")
    arguments, folder = (*SHORT, "--trackers=[trackio, tensorboard]"), tmp_path / "run"
    home: dict[str, Any] = {"TRACKIO_DIR": str(tmp_path / "trackio")}
    with Started("cpu", *arguments, folder=folder, **home) as started:
        started.wait_for("step     12/").wait_until(lambda: 8 in checkpoints(folder)).kill_all()
    run = launch("cpu", *arguments, folder=folder, **home).succeeded()
    expected = [{n: v for n, v in r.items() if not isinstance(v, list)} for r in without_times(run.records)]
    (name,) = SQLiteStorage.get_runs("accelerate-template")
    found = without_times(SQLiteStorage.get_logs("accelerate-template", name))
    found = [{n: v for n, v in log.items() if n != "timestamp"} for log in found]
    assert [record for record in found if record not in expected] == []
    assert [record for record in expected if record not in found and record["step"] > 8] == []
    settings: Any = SQLiteStorage.get_run_config("accelerate-template", name)
    assert settings["task"]["source"] == "digits"
    events = EventAccumulator(str(folder / "tensorboard")).Reload()
    for tag in {name for record in expected for name in record} - {"step"}:
        shown = [(event.step, event.value) for event in events.Scalars(tag)]
        assert shown == [(r["step"], float(np.float32(r[tag]))) for r in expected if tag in r]
    assert [*lines(run, "trackio    trackio show"), *lines(run, "TB         tensorboard --logdir")]
