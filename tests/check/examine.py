"""Examines a run in these processes again and again, each time with another fault planted: for each of the module's
FAULTS of this yaml, `… tests/check/examine.py OUTPUT.json MODULE YAML SETTINGS…` writes the rows that failed."""

import json
import sys
from pathlib import Path
from pkgutil import resolve_name

import pytest
from accelerate.state import AcceleratorState

import train
from src.check import examine
from src.check.context import CheckContext
from tests.check.planted import Fault, build_smaller, put
from train import run_settings


def failures(fault: Fault, settings: list[str]) -> list[dict[str, str]]:
    AcceleratorState._reset_state(reset_partial_state=True)  # the processes stay joined
    with pytest.MonkeyPatch.context() as patch:
        put(patch, "src.tasks.mnist.MnistCnn.__init__", build_smaller)
        put(patch, fault.where, fault.hook)
        run = train.build(run_settings([*settings, *fault.arguments]))
        assert run
        context = CheckContext(run, train.train_step, train.evaluate)
        return [row for row in examine(context) if row["means"]]


if __name__ == "__main__":
    output, module, yaml, *settings = sys.argv[1:]
    found: dict[str, list[dict[str, str]]] = {}
    for fault in resolve_name(f"{module}:FAULTS"):
        if fault.yaml == yaml:
            found[fault.name] = failures(fault, [*settings, f"--output_dir={Path(output).parent}/{len(found)}"])
    Path(output).write_text(json.dumps(found))
