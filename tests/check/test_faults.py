"""Each silent fault of distributed training is found by its check, after all is well so far, and its cause named."""

import json
from pathlib import Path

import pytest

from tests.check.planted import FAULTS
from tests.check.test_check import rows
from tests.launching import QUIET, Launch

SETTINGS = ("--task.source=digits", "--global_batch_size=16", "--epochs=4", *QUIET)


@pytest.mark.parametrize("yaml", ["cpu", "ddp", "fsdp"])
def test_each_fault_is_found_by_its_check(launch: Launch, tmp_path: Path, yaml: str) -> None:
    """In the same processes, one after the other."""
    output, faults = tmp_path / "found.json", {fault.name: fault for fault in FAULTS if fault.yaml == yaml}
    launch(yaml, str(output), "tests.check.planted", yaml, *SETTINGS, script="tests/check/examine.py").succeeded()
    found = json.loads(output.read_text())
    assert found.keys() == faults.keys()
    for name, fault in faults.items():
        assert {row["check"] for row in found[name]} == {fault.fails}, (name, found[name])
        assert fault.says in " ".join(row["measured"] + row["means"] for row in found[name]), (name, found[name])


@pytest.mark.parametrize(
    ("yaml", "fault", "runs"),
    [
        ("fsdp", "_fsdp_plugin = lambda *_: None", "DDP x 2"),
        ("ddp", "Accelerator = lambda cpu, build=accelerator.Accelerator, **of: build(cpu=False, **of)",
         "one process x 1"),
    ],
)  # fmt: skip
def test_another_strategy_than_was_asked_for_ends_the_run(launch: Launch, yaml: str, fault: str, runs: str) -> None:
    before = "from src.distributed import accelerator\naccelerator.refuse_another_strategy = lambda *_: None\n"
    run = launch(yaml, "--check", before=f"{before}accelerator.{fault}")
    assert run.exit_code == 1
    assert "FAILED: Launch" in run.stdout
    (failed,) = [row for row in rows(run) if row["means"]]
    assert (failed["check"], failed["measured"]) == ("Launch", runs)
    assert not json.loads((run.folder / "check.json").read_text())["passed"]
