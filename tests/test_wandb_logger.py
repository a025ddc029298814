"""Whatever happens to W&B, the training goes on, is told once, and the process ends."""

import json
import os
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.faults.runs import EACH_STEP, SHORT, assert_same_run, checkpoints, cut_back, without_times
from tests.launching import BIN, Launch, Started, Whole, slow

LOST = r"Connection lost|\[Errno \d+\] (Connection reset by peer|Broken pipe)"
"""What is said of a service that was killed: by asyncio or by the system, whichever notices first."""
SCRIPT = """
import os, sys, time
from asyncio import constants
import psutil
from pathlib import Path
from src import loggers
from src.config import load_config
from src.wandb_logger import WandbLogger

fault = sys.argv[1]
picture = "data:image/png;base64,iVBORw0KGgoAAAANSUhEUgAAAAQAAAAECAAAAACMmsGiAAAAC0lEQVR4nGNgwAQAABQAAX3+Hu4AAAAA"
picture += "SUVORK5CYII="
loggers.HANG_SECONDS = loggers.FINISH_SECONDS = 1.0
constants.LOG_THRESHOLD_FOR_CONNLOST_WRITES = 0  # asyncio warns of each lost write, not only from the sixth on

def service(signal):
    (core,) = (child for child in psutil.Process().children() if child.name() == "wandb-core")
    getattr(core, signal)()
    time.sleep(0.2)

def full(folder):
    raise OSError(28, "No space left on device")

config = load_config(["--task.source=digits", "--output_dir=."])
settings = config.wandb.model_dump() | {"mode": "offline", "model": "copy"}
facts = config.model_dump() | {"launch": {"config_file": None}}
Path("model").mkdir()
Path("model/weights").write_bytes(bytes(2**20))
logger = WandbLogger(print, dir=Path("/proc/x" if fault == "no folder" else "."), config=facts, **settings)
assert logger.where.startswith("offline") == (fault != "no folder"), logger.where
for step in range(3):
    logger.log({"step": step, "text": "x" * 2**21 * (fault == "hangs")}, {"table": [{"a": "b", "image": picture}]})
    while logger._busy_since and fault != "hangs":
        time.sleep(0.01)
    if step == 0 and fault in ("dies", "hangs"):
        service("kill" if fault == "dies" else "suspend")
    if step == 0 and fault == "a full disk":
        loggers.require_room = full
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

    Tried without the thread: it waits forever; without `_abandon`: so does the end of the process, or it shows a
    traceback; without looking for room: nobody hears of the lost records."""
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


def history(folder: Path) -> list[list[dict[str, Any]]]:
    """What W&B has of a run: the numbers of each record, by session."""
    sessions = []
    for file in sorted(folder.glob("wandb/offline-run-*/*.wandb")):
        shown = subprocess.run(
            [BIN / "wandb", "leet", "inspect", "--json", file.absolute()], check=True, capture_output=True, text=True
        )
        items = [row["history"]["item"] for row in map(json.loads, shown.stdout.splitlines()) if "history" in row]
        sessions.append([{n: v for n, v in item.items() if n[0] != "_" and "._" not in n} for item in items])
    return sessions


@pytest.mark.parametrize(
    ("yaml", "processes", "kept"), [("cpu", 1, None), ("ddp", 2, 0.35), slow("fsdp", 4, 0.35), slow("cpu", 1, 1.0)]
)
def test_it_has_each_record_once_over_a_kill_and_a_resume(
    launch: Launch, tmp_path: Path, yaml: str, processes: int, kept: float | None
) -> None:
    """Value by value, in order, whatever share of its file W&B has kept: of a killed run it loses up to 32 kB. A step
    that both sessions took keeps the first one's times. Tried without `recorded`: what both took is there twice;
    without `_catch_up`: the lost steps up to the checkpoint never."""
    arguments, folder = (*SHORT, "--checkpoint.keep_last=9"), tmp_path / "run"
    more: dict[str, Any] = {"processes": processes, "wandb": "offline"}
    if kept is None:
        with Started(yaml, *arguments, folder=folder, **more) as started:
            started.wait_for("step     12/").wait_until(lambda: 8 in checkpoints(folder)).kill_all()
    else:
        cut_back(launch(yaml, *arguments, **more).succeeded(), folder, 8)
        (file,) = folder.glob("wandb/offline-run-*/*.wandb")
        os.truncate(file, int(kept * file.stat().st_size))
    run = launch(yaml, *arguments, folder=folder, **more).succeeded()
    before, after = history(folder)
    repeated = {record["step"] for record in before if record["step"] > 8}
    assert bool(repeated) == (kept is not None)
    assert bool(after) == (kept != 1)
    seen = [record for record in before + after if record["step"] not in repeated]
    assert seen == [record for record in run.records if record["step"] not in repeated]
    assert without_times(before + after) == without_times(run.records)
