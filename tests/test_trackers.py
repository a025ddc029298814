"""trackio and TensorBoard have what metrics.jsonl has."""

from typing import Any

import numpy as np
import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from trackio.sqlite_storage import SQLiteStorage

from tests.faults.runs import lines, without_times
from tests.launching import Run
from tests.test_guarded import numbers


def test_they_have_each_record_over_a_kill_and_a_resume(recorded: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """But perhaps trackio the killed session's last. Tried without `purge_step`: TensorBoard has steps twice."""
    monkeypatch.setattr("trackio.sqlite_storage.TRACKIO_DIR", recorded.folder.parent / "trackio")
    expected = numbers(recorded)
    (name,) = SQLiteStorage.get_runs("accelerate-template")
    found = without_times(SQLiteStorage.get_logs("accelerate-template", name))
    for log in found:
        del log["timestamp"]
    assert [record for record in found if record not in expected] == []
    assert [record for record in expected if record not in found and record["step"] > 8] == []
    settings: Any = SQLiteStorage.get_run_config("accelerate-template", name)
    assert settings["task"]["source"] == "digits"
    events = EventAccumulator(str(recorded.folder / "tensorboard")).Reload()
    for tag in {name for record in expected for name in record} - {"step"}:
        shown = [(event.step, event.value) for event in events.Scalars(tag)]
        assert shown == [(r["step"], float(np.float32(r[tag]))) for r in expected if tag in r]
    assert [*lines(recorded, "trackio    trackio show"), *lines(recorded, "TB         tensorboard --logdir")]
