"""The record of a run, metrics.jsonl: its lines can be damaged, and there may be any number of them."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from src.checkpoint.compatibility import require_whole_metrics
from src.checkpoint.files import read_lines
from src.config.errors import UserError
from src.tracking import tracker as tracking
from src.training.progress import Progress
from train import run_settings

WHOLE = [{"step": 10, "train/loss": 1.0}, {"step": 20, "train/loss": None, "eval/mistakes": [{"label": "3"}]}]
DAMAGED = [b'{"step": 5, "train/loss": 1', b"\0" * 90, b"\xff\xfe", b"5", b'{"train/loss": 9}', b"[" * 10**5, b""]


def test_a_damaged_line_is_left_out_and_none_beside_it(tmp_path: Path) -> None:  # room: report sweep
    """With each kind of damage between two records, and cut short by a kill. Tried with json.loads: a traceback."""
    first, last = (json.dumps(record).encode() for record in WHOLE)
    file = tmp_path / "metrics.jsonl"
    file.write_bytes(b"\n".join([first, *DAMAGED, last, b'{"step": 30, "tra']))
    assert list(read_lines(file)) == [WHOLE[0], *[{}] * len(DAMAGED), WHOLE[1]]
    assert list(read_lines(tmp_path / "absent")) == []


def test_a_resume_takes_as_long_however_long_the_log_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Here 2**40 bytes, which no machine could read. Tried with reading all of it: a MemoryError."""
    last = b'\n{"step": 10, "train/loss": 1.0}\n'
    config = run_settings([f"--output_dir={tmp_path}"]).model_copy(update={"trackers": []})
    with (tmp_path / "metrics.jsonl").open("wb") as stream:
        stream.truncate(2**40)
        stream.seek(2**40)
        stream.write(last)
    state: Any = SimpleNamespace(metrics_bytes=2**40 + len(last), run_id=None)
    require_whole_metrics(config, tmp_path / "step_00000010", state)
    start: Any = SimpleNamespace(checkpoint=tmp_path, is_own=lambda _: True, own_state=lambda _: state)
    of_the_run = {"progress": Progress(step=10), "launch": SimpleNamespace()}
    run: Any = SimpleNamespace(config=config, is_main=True, resume=start, total_steps=20, **of_the_run)
    monkeypatch.setattr(tracking, "print_summary", lambda *_: None)
    with tracking.Tracker(run, {}) as tracker:
        assert tracker.state()["metrics_bytes"] == state.metrics_bytes
    state.metrics_bytes += 1
    with pytest.raises(UserError, match="restore it"):
        require_whole_metrics(config, tmp_path / "step_00000010", state)
