"""Whatever happens to W&B, the training goes on, is told once, and the process ends."""

import json
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.faults.runs import EACH_STEP, SHORT, assert_same_run, checkpoints, without_times
from tests.launching import BIN, Launch, Started, Whole, slow

LOST = r"Connection lost|\[Errno \d+\] (Connection reset by peer|Broken pipe)"
"""What is said of a service that was killed: by asyncio or by the system, whichever notices first."""


@pytest.mark.parametrize(("signal", "why"), [("kill", LOST), slow("suspend", "it has not answered for 3 seconds")])
def test_a_run_whose_wandb_service_dies_or_hangs_goes_on(launch: Launch, whole: Whole, signal: str, why: str) -> None:
    """Its summary says so, and it ends. Tried without `abandon`: the process does not end."""
    before = f"""
import psutil
from src.tracking import guard, wandb
guard.HANG_SECONDS = 3.0
log = wandb.WandbRecorder.log
def stop(self, record, tables):
    log(self, record, tables)
    if record["step"] == 3:
        (service,) = (child for child in psutil.Process().children() if child.name() == "wandb-core")
        service.{signal}()
wandb.WandbRecorder.log = stop
"""
    run = launch("cpu", *EACH_STEP, wandb="offline", before=before).succeeded()
    (line,) = [line for line in run.stdout.splitlines() if "W&B failed" in line or "Traceback" in line]
    assert re.fullmatch(rf"WARNING: W&B failed \(({why})\): the run goes on, recorded in metrics.jsonl", line)
    assert re.fullmatch(why, run.summary["tracker_failures"]["W&B"])
    assert_same_run(run, whole("cpu", *EACH_STEP))


def inspected(folder: Path) -> list[list[dict[str, Any]]]:
    """What W&B's offline files in a folder hold, file by file."""
    found = []
    for file in sorted(folder.glob("wandb/offline-run-*/*.wandb")):
        command = [str(BIN / "wandb"), "leet", "inspect", "--json", str(file.absolute())]
        shown = subprocess.run(command, check=True, capture_output=True, text=True).stdout
        found.append([json.loads(line) for line in shown.splitlines()])
    return found


def test_it_has_each_record_over_a_kill_and_a_resume(launch: Launch, tmp_path: Path) -> None:
    """Value by value, tables and pictures too; each session's steps in order, and in one run. Of a killed run it may
    lose the last 32 kB: metrics.jsonl is the exact record. Tried without the id that a checkpoint keeps: two runs."""
    arguments, folder = (*SHORT, "--checkpoint.keep_last=9"), tmp_path / "run"
    more: dict[str, Any] = {"wandb": "offline", "WANDB_DATA_DIR": str(tmp_path / "data")}
    with Started("ddp", *arguments, folder=folder, **more) as started:
        started.wait_for("step     12/").wait_until(lambda: 8 in checkpoints(folder)).kill_all()
    run = launch("ddp", *arguments, folder=folder, **more).succeeded()
    sessions = inspected(folder)
    before, after = (
        [
            {name: value for name, value in row["history"]["item"].items() if name[0] != "_" and "." not in name}
            for row in rows
            if "history" in row
        ]
        for rows in sessions
    )
    assert len({file.stem for file in folder.glob("wandb/offline-run-*/*.wandb")}) == 1
    expected = [{n: v for n, v in r.items() if not isinstance(v, list)} for r in without_times(run.records)]
    assert without_times(after) == [record for record in expected if record["step"] > 8]
    assert [record for record in without_times(before) if record not in expected] == []
    last = sorted(folder.glob("wandb/offline-run-*"))[-1]
    tables = last.glob("files/media/table/eval/mistakes_*.json")
    table = max(tables, key=lambda file: int(file.name.split("_")[1]))
    shown = json.loads(table.read_text())["data"]
    assert [row[1:] for row in shown] == [list(row.values())[1:] for row in run.records[-1]["eval/mistakes"]]
    assert json.dumps(sessions[-1]).count(".png") >= len(shown)


def test_it_has_the_model_and_the_checkpoints_as_artifacts(launch: Launch, tmp_path: Path) -> None:
    """By reference: nothing of them is copied. Tried with `copy`: no references."""
    steps = ("--max_steps=12", "--log_every=4", "--eval_every=4", "--save_every=4", "--checkpoint.keep_last=9")
    more: dict[str, Any] = {"wandb": "offline", "WANDB_DATA_DIR": str(tmp_path)}
    run = launch("cpu", *steps, "--wandb.checkpoints=reference", **more).succeeded()
    (rows,) = inspected(run.folder)
    artifacts = [row["artifact"] for row in rows if "artifact" in row]
    artifacts = [artifact for artifact in artifacts if artifact["type"] in ("checkpoint", "model")]
    expected = {"checkpoints/step_00000004": ["latest", "step-4"],
                "checkpoints/step_00000008": ["latest", "step-8"],
                "checkpoints/step_00000012": ["latest", "step-12"], "model": ["latest"]}  # fmt: skip
    for artifact, (name, aliases) in zip(artifacts, expected.items(), strict=True):
        assert sorted(artifact["aliases"]) == sorted(aliases)
        files = {path.as_uri(): path.stat().st_size for path in (run.folder / name).iterdir()}
        assert {entry["ref"]: int(entry["size"]) for entry in artifact["manifest"]["contents"]} == files
    kept = [*tmp_path.rglob("*"), *(run.folder / "wandb").rglob("*")]
    assert max(path.stat().st_size for path in kept if path.is_file()) < 1_000_000  # of a model of 5 MB
