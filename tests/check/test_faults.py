"""Each silent fault of distributed training is found by its check, after all is well so far, and its cause named."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.check.planted import ALONE, FAULTS, Fault
from tests.launching import QUIET, Launch


@pytest.mark.parametrize(
    "fault",
    [pytest.param(f, id=f.name, marks=[pytest.mark.slow] if f.is_slow else []) for f in FAULTS.values()],
)
def test_fault(launch: Launch, tmp_path: Path, fault: Fault) -> None:
    """Run --check with the fault."""
    settings = ("--check", "--task.source=digits", f"--output_dir={tmp_path}/run", *QUIET, *fault.arguments)
    more: dict[str, Any] = {"script": "tests/check/planted.py", "processes": 2, "folder": tmp_path / "run"}
    run = launch(fault.yaml, fault.name, *settings, **more)
    assert run.exit_code == 1
    found = json.loads((run.folder / "check.json").read_text())
    failed = [row for row in found["checks"] if row["means"]]
    assert not found["passed"]
    assert {row["check"] for row in failed} == {fault.fails}, run.stdout
    assert any(fault.says in row["measured"] + row["means"] for row in failed), failed
    assert f"FAILED: {fault.fails}" in run.stdout


def test_faults_that_one_process_shows(launch: Launch, tmp_path: Path) -> None:
    """All of them in one process, and nothing in the project without them."""
    output, sizes = tmp_path / "found.json", ("--global_batch_size=16", "--epochs=4")
    settings = ("--task.source=digits", *sizes, f"--output_dir={tmp_path}/run", *QUIET)
    launch("cpu", str(output), *settings, script="tests/check/examine.py").succeeded()
    failed = json.loads(output.read_text())
    assert failed.pop("") == []
    checks = {name: {row["check"] for row in rows} for name, rows in failed.items()}
    assert checks == {fault.name: {fault.fails} for fault in ALONE.values()}, failed
    said = {name: " ".join(row["measured"] + row["means"] for row in rows) for name, rows in failed.items()}
    assert [fault.name for fault in ALONE.values() if fault.says not in said[fault.name]] == [], failed
