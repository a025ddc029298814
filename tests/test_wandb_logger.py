"""Whatever happens to W&B, the training goes on, is told once, and the process ends."""

import base64
import json
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.faults.runs import EACH_STEP, SHORT, assert_same_run, checkpoints, without_times
from tests.launching import BIN, Launch, Started, Whole

LOST = r"Connection lost|\[Errno \d+\] (Connection reset by peer|Broken pipe)"
"""What is said of a service that was killed: by asyncio or by the system, whichever notices first."""
SCRIPT = """
import os, sys, time
from asyncio import constants
import psutil
from pathlib import Path
from types import SimpleNamespace
from src.tracking import guard
from src.checkpoint.folder import run_settings
from src.tracking import wandb

fault = sys.argv[1]
picture = "data:image/png;base64,iVBORw0KGgoAAAANSUhEUgAAAAQAAAAECAAAAACMmsGiAAAAC0lEQVR4nGNgwAQAABQAAX3+Hu4AAAAA"
picture += "SUVORK5CYII="
guard.HANG_SECONDS = guard.FINISH_SECONDS = wandb.FINISH_SECONDS = 1.0
constants.LOG_THRESHOLD_FOR_CONNLOST_WRITES = 0  # asyncio warns of each lost write, not only from the sixth on

def service(signal):
    (core,) = (child for child in psutil.Process().children() if child.name() == "wandb-core")
    getattr(core, signal)()
    time.sleep(0.2)

def full(folder):
    raise OSError(28, "No space left on device")

config = run_settings(["--task.source=digits", "--output_dir=.", "--wandb.mode=offline", "--wandb.model=copy"])
wandb.describe = lambda run: config.model_dump() | {"launch": {"config_file": None}}
run = SimpleNamespace(config=config, progress=SimpleNamespace(evaluations={}))
Path("model").mkdir()
Path("model/weights").write_bytes(bytes(2**20))
(logger,) = wandb.start_wandb(run, print, Path("/proc/x" if fault == "no folder" else "."))
assert logger.where.startswith("offline") == (fault != "no folder"), logger.where
for step in range(3):
    numbers = {"step": step, "text": "x" * 2**21 * (fault == "hangs")}
    logger.tell(logger.recorder.log, numbers, {"table": [{"a": "b", "image": picture}]})
    while logger._busy_since < float("inf") and fault != "hangs":
        time.sleep(0.01)
    if step == 0 and fault in ("dies", "hangs"):
        service("kill" if fault == "dies" else "suspend")
    if step == 0 and fault == "a full disk":
        guard.require_room = full
    time.sleep(0.2 + 1.5 * (fault == "hangs"))
if "finish" in fault:
    service("kill" if fault == "dies at the finish" else "suspend")
logger.finish(0)
print("failure:", logger.failure)
time.sleep(0.5)
print("left:", [child.name() for child in psutil.Process().children(recursive=True) if child.status() != "zombie"])
"""


@pytest.mark.parametrize(
    ("fault", "why"),
    [
        ("none", None),
        ("dies", LOST),
        ("dies at the finish", LOST),
        ("hangs", "it has not answered for 1 seconds"),
        ("hangs at the finish", "it has not answered for 2 seconds"),
        ("a full disk", r"\[Errno 28\] No space left on device"),
        ("no folder", r"\[Errno 2\] No such file or directory: '/proc/"),
    ],
)
def test_its_service(launch: Launch, tmp_path: Path, fault: str, why: str | None) -> None:
    """Killed or stopped, between two records or while the run is finished; and a folder that can't be written.

    Tried without `abandon`: the process does not end; without looking for room: nobody hears of the lost records."""
    (tmp_path / "script.py").write_text(SCRIPT)
    done = launch("cpu", fault, script=str(tmp_path / "script.py"), cwd=tmp_path).succeeded()
    assert set(done.stderr.splitlines()) <= {"wandb: ERROR Problem finishing run"}
    said = [line for line in done.stdout.splitlines() if line.startswith("WARNING")]
    assert len(said) == (why is not None and fault != "no folder")
    for line in said:
        assert re.fullmatch(rf"WARNING: W&B failed \(({why})\): the run goes on, recorded in metrics.jsonl", line)
    assert re.search(f"failure: ({why})", done.stdout)
    assert fault == "none" or "left: []" in done.stdout


def test_a_run_whose_wandb_service_is_killed_goes_on(whole: Whole, tmp_path: Path) -> None:
    """And its summary says so. Tried without: ConnectionResetError ends it."""
    with Started("cpu", *EACH_STEP, folder=tmp_path / "run", wandb="offline") as started:
        started.wait_for("step      3/")
        services = [child for child in started.trainers[0].children() if child.name() == "wandb-core"]
        services[0].kill()
        run = started.ended()
    assert run.exit_code == 0, run.stdout
    (line,) = [line for line in run.stdout.splitlines() if "W&B failed" in line or "Traceback" in line]
    assert re.fullmatch(rf"WARNING: W&B failed \(({LOST})\): the run goes on, recorded in metrics.jsonl", line)
    assert re.fullmatch(LOST, run.summary["tracker_failures"]["W&B"])
    assert_same_run(run, whole("cpu", *EACH_STEP))


def inspected(folder: Path) -> list[list[dict[str, Any]]]:
    """What W&B's offline files in a folder hold, file by file."""
    found = []
    for file in sorted(folder.glob("wandb/offline-run-*/*.wandb")):
        command = [str(BIN / "wandb"), "leet", "inspect", "--json", str(file.absolute())]
        shown = subprocess.run(command, check=True, capture_output=True, text=True).stdout
        found.append([json.loads(line) for line in shown.splitlines()])
    return found


def contents(rows: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """The manifests of the artifacts, by the id that tables refer to: each file's entry by its path there."""
    artifacts = [row["artifact"] for row in rows if "artifact" in row]
    return {a["client_id"]: {entry["path"]: entry for entry in a["manifest"]["contents"]} for a in artifacts}


def table(entries: dict[str, Any], path: str) -> list[dict[str, Any]]:
    """The rows of a table in an artifact, with its pictures as metrics.jsonl has them."""
    shown = json.loads(Path(entries[path]["local_path"]).read_text())
    rows = [dict(zip(shown["columns"], row, strict=True)) for row in shown["data"]]
    for row in rows:
        for name, cell in row.items():
            if isinstance(cell, dict):
                assert cell["_type"] == "image-file"
                png = Path(entries[cell["path"]]["local_path"]).read_bytes()
                row[name] = "data:image/png;base64," + base64.b64encode(png).decode()
    return rows


def history(folder: Path) -> list[list[dict[str, Any]]]:
    """What W&B has of a run's records: numbers and tables, by session."""
    sessions: list[list[dict[str, Any]]] = []
    for rows in inspected(folder):
        sessions.append([])
        for item in (row["history"]["item"] for row in rows if "history" in row):
            record = {name: value for name, value in item.items() if name[0] != "_" and "." not in name}
            for name in [name.removesuffix(".artifact_path") for name in item if name.endswith(".artifact_path")]:
                client, _, path = item[f"{name}.artifact_path"].removeprefix("wandb-client-artifact://").partition("/")
                record[name] = table(contents(rows)[client], path)
            sessions[-1].append(record)
    return sessions


def test_it_has_each_record_over_a_kill_and_a_resume(launch: Launch, tmp_path: Path) -> None:
    """Value by value, tables and pictures too; each session's steps in order, and in one run. Of a killed run it may
    lose the last 32 kB: metrics.jsonl is the exact record. Tried without the id that a checkpoint keeps: two runs."""
    arguments, folder = (*SHORT, "--checkpoint.keep_last=9"), tmp_path / "run"
    more: dict[str, Any] = {"processes": 2, "wandb": "offline", "WANDB_DATA_DIR": str(tmp_path / "data")}
    with Started("ddp", *arguments, folder=folder, **more) as started:
        started.wait_for("step     12/").wait_until(lambda: 8 in checkpoints(folder)).kill_all()
    run = launch("ddp", *arguments, folder=folder, **more).succeeded()
    before, after = history(folder)
    assert len({file.stem for file in folder.glob("wandb/offline-run-*/*.wandb")}) == 1
    expected = without_times(run.records)
    resumed = next(i for i, record in enumerate(expected) if record["step"] > 8)
    assert without_times(after) == expected[resumed:]
    assert [record for record in without_times(before) if record not in expected] == []


def test_it_has_the_model_and_the_checkpoints_as_artifacts(launch: Launch, tmp_path: Path) -> None:
    """By reference: nothing of them is copied. The first checkpoint is the best by `checkpoint.mode`. The chat template
    is among the files. Tried with `copy`: no references; without the mode: `best` is each one."""
    data = tmp_path / "data"
    steps = ("--max_steps=12", "--log_every=4", "--eval_every=4", "--save_every=4", "--checkpoint.keep_last=9")
    settings = ("--checkpoint.metric=eval/accuracy", "--checkpoint.mode=min", "--wandb.checkpoints=reference")
    before = "from pathlib import Path; import src.checkpoint.export as e; write = e.export_model\n"
    before += "def with_template(run, metrics):\n    write(run, metrics)\n"
    before += "    Path(run.config.folder, 'model/chat_template.jinja').write_text('a template')\n"
    before += "e.export_model = with_template"
    more: dict[str, Any] = {"wandb": "offline", "WANDB_DATA_DIR": str(data), "before": before}
    run = launch("cpu", *steps, *settings, **more).succeeded()
    (rows,) = inspected(run.folder)
    artifacts = [row["artifact"] for row in rows if "artifact" in row]
    artifacts = [artifact for artifact in artifacts if artifact["type"] in ("checkpoint", "model")]
    first, *later = [record["eval/accuracy"] for record in run.records if "eval/accuracy" in record]
    assert first < min(later)
    expected = [["best", "latest", "step-4"], ["latest", "step-8"], ["latest", "step-12"], ["latest"]]
    assert [sorted(artifact["aliases"]) for artifact in artifacts] == [sorted(aliases) for aliases in expected]
    folders = [run.folder / "checkpoints" / f"step_{step:08d}" for step in (4, 8, 12)] + [run.folder / "model"]
    for artifact, folder in zip(artifacts, folders, strict=True):
        entries = {entry["path"]: entry for entry in artifact["manifest"]["contents"]}
        files = {str(path.relative_to(folder)): path for path in folder.rglob("*") if path.is_file()}
        found = {name: (entry["ref"], int(entry["size"])) for name, entry in entries.items()}
        assert found == {name: (path.as_uri(), path.stat().st_size) for name, path in files.items()}
    weights = (run.folder / "model" / "model.safetensors").stat().st_size
    kept = [*data.rglob("*"), *(run.folder / "wandb").rglob("*")]
    assert max(path.stat().st_size for path in kept if path.is_file()) < weights / 10
    names = {path.name for path in run.folder.glob("wandb/offline-run-*/files/run/*")}
    assert names == {"config.yaml", "cpu.yaml", "chat_template.jinja"}


def test_a_start_that_hangs(launch: Launch, tmp_path: Path) -> None:
    """It is waited for as long as a start may take, and the run then goes on."""
    before = "import time; from src.tracking import guard; guard.START_SECONDS = guard.HANG_SECONDS = 1.0\n"
    before += "import wandb; wandb.init = lambda **_: time.sleep(10_000)"
    run = launch("cpu", "--max_steps=2", wandb="offline", before=before).succeeded()
    why = "it has not started within 1 seconds"
    assert f"  W&B        not recorded: {why}" in run.stdout.splitlines()
    assert run.summary["tracker_failures"] == {"W&B": why}
    assert "WARNING" not in run.stdout


def test_other_machines_have_runs_of_their_own(launch: Launch, tmp_path: Path) -> None:
    """In the run's group, with the system's metrics and the exit code alone; without the setting, none."""
    where = ("--num_machines=2", "--main_process_ip=127.0.0.1", "--machine_rank=0")
    for is_on in ("true", "false"):
        folder = tmp_path / is_on
        arguments = ("--max_steps=2", "--run_name=x", f"--wandb.machines={is_on}")
        more: dict[str, Any] = {"launcher_arguments": where, "wandb": "offline", "WANDB_DIR": str(folder)}
        folder.mkdir()
        run = launch("ddp", *arguments, folder=folder / "run", **more).succeeded()
        of_the_first, others = inspected(run.folder), inspected(folder)
        assert (len(of_the_first), len(others)) == (1, int(is_on == "true"))
        for rows in others:
            (about,) = [row["run"] for row in rows if "run" in row]
            assert (about["run_group"], about["job_type"], about["display_name"]) == ("x", "machine-1", "x machine-1")
            assert not [row for row in rows if "history" in row]
            assert [row for row in rows if "stats" in row]
            assert [row["exit"]["exit_code"] for row in rows if "exit" in row] == [0]
            assert [row["run"]["run_group"] for row in of_the_first[0] if "run" in row] == ["x"]
