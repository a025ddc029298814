"""Each silent fault of distributed training is found by its check, and by no other, and the cause is named."""

import json
from pathlib import Path

import pytest

from tests.check.planted import FAULTS, MORE, Fault, plant
from tests.launching import Launch


@pytest.mark.parametrize(
    "fault", [*FAULTS, *(pytest.param(fault, marks=pytest.mark.slow) for fault in MORE)], ids=lambda fault: fault.name
)
def test_fault(launch: Launch, tmp_path: Path, fault: Fault) -> None:
    require_found(launch, fault, plant(fault, tmp_path))


def require_found(launch: Launch, fault: Fault, project: Path) -> None:
    """Run --check on the project with the fault."""
    more = {"project": project, "launcher_arguments": fault.launcher_arguments, "processes": 2}
    run = launch(fault.yaml, "--check", *fault.arguments, **more)
    assert run.exit_code == 1
    found = json.loads((run.folder / "check.json").read_text())
    failed = [row for row in found["checks"] if row["result"] == "fail"]
    assert not found["passed"]
    assert {row["check"] for row in failed} == fault.fails, run.stdout
    assert any(fault.says in row["measured"] + row["means"] for row in failed), failed
    assert f"FAILED: {', '.join(sorted(fault.fails))}" in run.stdout
