"""Whatever happens to W&B, the training goes on, is told once, and the process ends."""

import re
from pathlib import Path

import pytest

from tests.faults.runs import EACH_STEP, assert_same_run
from tests.launching import Launch, Started, Whole

LOST = r"Connection lost|\[Errno \d+\] (Connection reset by peer|Broken pipe)"
"""What is said of a service that was killed: by asyncio or by the system, whichever notices first."""
SCRIPT = """
import os, sys, time
from asyncio import constants
import psutil
from src import wandb_logger

fault = sys.argv[1]
wandb_logger.HANG_SECONDS = wandb_logger.FINISH_SECONDS = 1.0
constants.LOG_THRESHOLD_FOR_CONNLOST_WRITES = 0  # asyncio warns of each lost write, not only from the sixth on

def service(signal):
    (core,) = (child for child in psutil.Process().children() if child.name() == "wandb-core")
    getattr(core, signal)()
    time.sleep(0.2)

def full(folder):
    raise OSError(28, "No space left on device")

folder = "." if fault != "no folder" else "/proc"
logger = wandb_logger.WandbLogger(print, mode="offline", dir=folder)
assert logger.where.startswith("offline") == (fault != "no folder"), logger.where
for step in range(3):
    logger.log({"step": step, "text": "x" * 2**21 * (fault == "hangs")}, {"table": [{"a": "b"}]})
    while logger._busy_since and fault != "hangs":
        time.sleep(0.01)
    if step == 0 and fault in ("dies", "hangs"):
        service("kill" if fault == "dies" else "suspend")
    if step == 0 and fault == "a full disk":
        wandb_logger._require_room = full
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
        ("hangs", "its service has not answered for 1 seconds"),
        ("hangs at the finish", "its service has not answered for 2 seconds"),
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
        assert re.fullmatch(rf"WARNING: W&B failed \(({why})\): the run goes on, recorded in metrics.jsonl alone", line)
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
    assert re.fullmatch(rf"WARNING: W&B failed \(({LOST})\): the run goes on, recorded in metrics.jsonl alone", line)
    assert re.fullmatch(LOST, run.summary["wandb_failure"])
    assert_same_run(run, whole("cpu", *EACH_STEP))
