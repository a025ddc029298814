"""Events: what happened to a run is in events.jsonl, in the terminal and, by setting, at those who watch it."""

import json
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from src.alerts import Alerts, Events
from src.checkpoint import resume
from src.checkpoint.output_folder import read_lines
from src.config import load_config
from src.process import UserError
from tests.faults.runs import SHORT
from tests.launching import PROJECT, Launch, Run


class Stage:
    """A run on the main process, as Events sees it, and what it makes known."""

    def __init__(self, folder: Path, **settings: Any) -> None:
        self.alerts: list[tuple[str, str]] = []
        self.said: list[str] = []
        self.progress = SimpleNamespace(step=0, evaluations={})
        run: Any = SimpleNamespace(
            progress=self.progress,
            resume=SimpleNamespace(summary=""),
            resume_command="train.py",
            config=SimpleNamespace(
                alerts=Alerts(**settings), folder=folder, run_name="mine", timeout_minutes=30.0, max_hours=None
            ),
            is_evaluation_due=lambda: False,
            is_evaluated=lambda: False,
            is_save_due=lambda: False,
        )
        self.run = run
        (folder / "metrics.jsonl").touch()
        logger = SimpleNamespace(alert=lambda title, text: self.alerts.append((title, text)))
        self.events = Events(run, self.said.append, [logger])

    @property
    def file(self) -> list[dict[str, Any]]:
        return events(self.run.config.folder)

    def record(self, *losses: float | None, **more: Any) -> None:
        for loss in losses:
            self.progress.step += 10
            self.events.log({"step": self.progress.step, "train/loss": loss, **more}, {})


def events(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines()]


CALM = [1.0, 1.1, 0.9, 1.0, 1.05, 0.95, 1.0, 1.1, 0.9, 1.0, 1.02]


def test_a_loss_far_above_the_last_ones_is_a_spike(tmp_path: Path) -> None:
    """Tried with falling losses counted too, and without asking for ten records."""
    Stage(tmp_path).record(*CALM[:9], 9.0)
    assert [event["kind"] for event in events(tmp_path)] == ["start"]
    (tmp_path / "events.jsonl").unlink()
    stage = Stage(tmp_path)
    stage.record(*CALM, 1.3, None, 0.1)
    assert len(stage.file) == 1
    stage.record(4.0)
    stage.record(4.0)  # now some of the last are as high
    spike = stage.file[1]
    assert (spike["kind"], spike["step"], len(stage.file)) == ("spike", 150, 2)
    assert spike["text"].startswith("the training loss is 4, after 0.9")
    assert stage.said == [f"WARNING: spike: {spike['text']}"]
    assert stage.alerts == [("mine: spike", f"step 150: {spike['text']}")]


def test_a_constant_loss_spikes_only_by_more_than_rounding(tmp_path: Path) -> None:
    """Tried without the deviation's lower bound."""
    stage = Stage(tmp_path, spike_z=3)
    stage.record(*[2.0] * 12, 2.05)
    assert len(stage.file) == 1
    stage.record(2.1)
    assert stage.file[1]["kind"] == "spike"


@pytest.mark.parametrize("tables", [0, 3 * 2**20], ids=["no tables", "large tables"])
def test_what_a_resumed_run_finds_is_what_it_would_have_found(tmp_path: Path, tables: int) -> None:
    """Tried without reading metrics.jsonl, and with its last 2**20 bytes alone: too few records are known to find the
    spike, and steps skipped long ago are told again."""
    stage = Stage(tmp_path)
    stage.record(*CALM, **{"train/skipped_steps": 3})
    records = [{"step": 10 * i, "train/loss": loss, "train/skipped_steps": 3} for i, loss in enumerate(CALM, start=1)]
    records.append({"step": 110, "eval/loss": 1.0, "eval/mistakes": [{"text": "x" * tables}]})
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    resumed = Stage(tmp_path)
    before = len(resumed.file)
    for each in (stage, resumed):
        each.record(3.0, **{"train/skipped_steps": 5})
    whole, after = resumed.file[before:-2], resumed.file[-2:]
    assert [event["kind"] for event in after] == ["spike", "skipped"]
    assert [event["text"] for event in whole] == [event["text"] for event in after]
    assert resumed.file[-1]["text"] == "2 steps since the last record, as their gradients were not finite"


def test_a_damaged_record_is_no_traceback_and_said_once(tmp_path: Path) -> None:
    """Each line is another kind of damage, and a kill's cut at the end is none. Tried with json.loads: a traceback."""
    lines = [json.dumps({"step": 10 * i, "train/loss": loss}).encode() for i, loss in enumerate(CALM, start=1)]
    damaged = [b'{"step": 5, "train/loss": 1', b"\0" * 90, b"\xff\xfe", b"5", b'{"train/loss": 9}', b"[" * 10**5]
    content = b"\n".join([*lines[:5], *damaged, *lines[5:]])
    (tmp_path / "metrics.jsonl").write_bytes(content + b'\n{"step": 120, "tra')
    stage = Stage(tmp_path)
    says = "6 of its last lines are damaged, and left out wherever it is read"
    assert stage.said == [f"WARNING: {tmp_path}/metrics.jsonl: {says}"]
    stage.record(4.0, **{"train/skipped_steps": 0})
    assert [event["kind"] for event in stage.file] == ["start", "spike"]
    assert list(read_lines(tmp_path / "metrics.jsonl")).count({}) == 6


def test_a_start_takes_as_long_whatever_the_length_of_the_record(tmp_path: Path) -> None:
    """Here 2**40 bytes, which no machine could read. Tried with reading all of it: a MemoryError, for each."""
    last, config = b'\n{"step": 10, "train/loss": 1.0}\n', load_config([f"--output_dir={tmp_path}"])
    with (tmp_path / "metrics.jsonl").open("wb") as stream:
        stream.truncate(2**40)
        stream.seek(2**40)
        stream.write(last)
    assert Stage(tmp_path).said == []
    state: Any = SimpleNamespace(metrics_bytes=2**40 + len(last))
    resume._require_whole_record(config, tmp_path / "step_00000010", state)
    state.metrics_bytes -= 1
    with pytest.raises(UserError, match="has other lines than"):
        resume._require_whole_record(config, tmp_path / "step_00000010", state)


def test_steps_that_fp16_skips_to_find_its_scale_are_no_event(tmp_path: Path) -> None:
    """Tried without looking for the scale."""
    stage = Stage(tmp_path)
    stage.record(1.0, **{"train/skipped_steps": 3, "train/loss_scale": 1024.0})
    assert [event["kind"] for event in stage.file] == ["start"]


def test_who_is_told_of_what_is_a_setting(tmp_path: Path) -> None:
    """Tried without the setting: the spike is sent."""
    stage = Stage(tmp_path, kinds=["end", "crash"])
    stage.record(*CALM, 5.0)
    assert stage.alerts == []
    stage.events.summarize({"eval/loss": 0.25, "eval/accuracy": 0.9, "seconds": 12.0})
    assert stage.alerts == [("mine: end", "step 120: eval/loss 0.25, eval/accuracy 0.9")]


def kinds(run: Run) -> list[tuple[str, int]]:
    return [(event["kind"], event["step"]) for event in events(run.folder)]


def test_a_stopped_and_resumed_run_has_its_events_in_one_file(launch: Launch, tmp_path: Path) -> None:
    """Tried with the file opened anew: the first start is gone."""
    folder = tmp_path / "run"
    stopped_run = launch("ddp", *SHORT, "--max_hours=1e-9", folder=folder, processes=2).succeeded()
    step = stopped_run.status["step"]
    run = launch("ddp", *SHORT, folder=folder, processes=2).succeeded()
    assert kinds(run) == [("start", 0), ("stopped", step), ("start", step), ("end", 30)]
    start, stopped, again, end = events(folder)
    assert start["command"].startswith("accelerate launch --config_file")
    assert "--max_steps=30" in start["command"]
    head = subprocess.run(["git", "rev-parse", "HEAD"], cwd=PROJECT, capture_output=True, text=True).stdout.strip()
    assert start["commit"].removesuffix("-dirty") == head
    assert stopped["text"] == "max_hours=1e-09"
    assert again["text"].startswith(f"after step {step}, from {folder}")
    assert f"eval/accuracy {run.summary['eval/accuracy']:.4g}" in end["text"]


def test_a_run_that_raises_leaves_the_last_line_of_it(launch: Launch) -> None:
    """And steps that it skipped before. Tried without sys.exc_info: no crash."""
    run = launch("cpu", *SHORT, "--max_bad_steps=3", FAULT="nan forever", FAULT_RANK="0", FAULT_STEP="10")
    assert run.exit_code == 1
    assert kinds(run) == [("start", 0), ("skipped", 10), ("skipped", 11), ("crash", 12)]
    assert events(run.folder)[-1]["text"].startswith("RunError: 3 steps in a row had gradients that are not finite")
