"""Whatever happens to W&B, the training goes on, is told once, and the process ends."""

import json
import re
import shutil
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from tests.faults.runs import ALL, assert_same_run, checkpoints, without_times
from tests.launching import BIN, Launch, Run, Whole, mistakes, run_command, slow
from tests.test_guarded import numbers
from train import run_settings

LOST = r"Connection lost|\[Errno \d+\] (Connection reset by peer|Broken pipe)"
"""What is said of a service that was killed: by asyncio or by the system, whichever notices first."""


@pytest.mark.parametrize(("signal", "why"), [("kill", LOST), slow("suspend", "no answer for 3 seconds")])
def test_a_run_whose_wandb_service_dies_or_hangs_goes_on(launch: Launch, whole: Whole, signal: str, why: str) -> None:
    """Its summary says so, and it ends. Tried without `abandon`: the process does not end."""
    before = f"""
import psutil
from src.tracking import guard, wandb
guard.HANG_SECONDS = 3.0
log = wandb.WandbPart.log
def stop(self, record, tables):
    log(self, record, tables)
    if record["step"] == 3:
        (service,) = (child for child in psutil.Process().children() if child.name() == "wandb-core")
        service.{signal}()
wandb.WandbPart.log = stop
"""
    run = launch("cpu", *ALL, wandb="offline", before=before).succeeded()
    (line,) = [line for line in run.stdout.splitlines() if "W&B failed" in line or "Traceback" in line]
    assert re.fullmatch(rf"WARNING: W&B failed \(({why})\); training continues, logged in metrics.jsonl", line)
    assert re.fullmatch(why, run.summary["tracker_failures"]["W&B"])
    assert_same_run(run, whole("cpu", *ALL))


@pytest.fixture(scope="module")
def sessions(recorded: Run) -> list[list[dict[str, Any]]]:
    """What W&B's offline files hold of the run, session by session."""
    found = []
    for file in sorted(recorded.folder.glob("wandb/offline-run-*/*.wandb")):
        command = [str(BIN / "wandb"), "leet", "inspect", "--json", str(file)]
        shown = run_command(command, recorded.folder).succeeded().stdout
        found.append([json.loads(line) for line in shown.splitlines()])
    return found


def test_it_has_each_record_over_a_kill_and_a_resume(recorded: Run, sessions: Any) -> None:
    """Tables and pictures too, but the last 32 kB of a killed run. Tried without the id in a checkpoint: two runs."""
    before, after = (
        [
            {name: value for name, value in row["history"]["item"].items() if name[0] != "_" and "." not in name}
            for row in rows
            if "history" in row
        ]
        for rows in sessions
    )
    *_, last = folders = sorted(recorded.folder.glob("wandb/offline-run-*"))
    assert len({folder.name.split("-")[-1] for folder in folders}) == 1
    expected = numbers(recorded)
    assert without_times(after) == [record for record in expected if record["step"] > 8]
    assert [record for record in without_times(before) if record not in expected] == []
    tables = last.glob("files/media/table/eval/mistakes_*.json")
    table = max(tables, key=lambda file: int(file.name.split("_")[1]))
    shown = json.loads(table.read_text())["data"]
    assert [row[1:] for row in shown] == [list(row.values())[1:] for row in recorded.records[-1]["eval/mistakes"]]
    assert json.dumps(sessions[-1]).count(".png") >= len(shown)


def test_it_has_the_model_and_the_checkpoints_as_artifacts(recorded: Run, sessions: Any) -> None:
    """By reference: nothing of them is copied. Tried with `copy`: no references."""
    expected = {f"checkpoints/step_{step:08}": {"latest", f"step-{step}"} for step in checkpoints(recorded.folder)}
    expected["model"] = {"latest"}
    artifacts = [row["artifact"] for row in sessions[-1] if "artifact" in row]
    artifacts = [artifact for artifact in artifacts if artifact["type"] in ("checkpoint", "model")]
    for artifact, (name, aliases) in zip(artifacts, expected.items(), strict=True):
        assert {*artifact["aliases"]} == aliases
        files = {path.as_uri(): path.stat().st_size for path in (recorded.folder / name).iterdir()}
        assert {entry["ref"]: int(entry["size"]) for entry in artifact["manifest"]["contents"]} == files
    kept = recorded.folder.parent.glob("**/wandb/**/*")
    assert max(path.stat().st_size for path in kept if path.is_file()) < 1_000_000  # of a model of 5 MB


NO_ARTIFACT = "resume=wandb:me/digits/checkpoint-x:best: cannot be downloaded, "
FROM_ARTIFACT = ("--task.source=digits", "--resume=wandb:me/digits/checkpoint-x:best")


def test_a_run_starts_from_an_artifact(whole: Whole, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The alias becomes a version. Tried without looking for it: it is downloaded a second time."""
    monkeypatch.chdir(tmp_path)
    source = whole("cpu", "--max_steps=4").folder / "checkpoints" / "step_00000004"
    downloads: list[str] = []

    def download(root: str) -> None:
        downloads.append(root)
        shutil.copytree(source, root, dirs_exist_ok=True)

    monkeypatch.setattr("wandb.login", lambda **_: True)
    api = Mock()
    api.artifact.side_effect = lambda name: Mock(qualified_name=name.replace(":best", ":v3"), download=download)
    monkeypatch.setattr("wandb.Api", lambda: api)
    for _ in range(2):
        config = run_settings([*FROM_ARTIFACT, "--max_steps=8"])
        assert config.resume == "artifacts/me/digits/checkpoint-x:v3"
    assert len(downloads) == 1


def test_an_artifact_that_cannot_be_had(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Without credentials, a network, or such an artifact: one line."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("wandb.login", lambda **_: False)
    assert mistakes(*FROM_ARTIFACT) == [f"{NO_ARTIFACT}no credentials: `wandb login` first"]
    monkeypatch.setattr("wandb.login", lambda **_: True)
    monkeypatch.setattr("wandb.Api", Mock(side_effect=ValueError("Unable to fetch\nan artifact")))
    assert mistakes(*FROM_ARTIFACT) == [f"{NO_ARTIFACT}Unable to fetch an artifact"]


def test_nothing_is_downloaded_for_help_or_beside_other_mistakes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("wandb.login", None)
    with pytest.raises(SystemExit):
        run_settings([*FROM_ARTIFACT, "--help"])
    assert mistakes(*FROM_ARTIFACT, "--sed=1") == ["--sed=1: unknown setting, did you mean seed?"]
