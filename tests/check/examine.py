"""Builds and examines a run in these processes again and again, each time with another fault planted in it.

    accelerate launch … tests/check/examine.py OUTPUT.json YAML SETTINGS…

It writes, for each of the planted faults of this yaml by name, the rows that failed.
"""

import json
import sys
from pathlib import Path

import pytest
from accelerate.state import AcceleratorState

import train
from src.check import CHECKS, examine
from src.check.subject import Subject
from tests.check import planted
from tests.check.planted import Fault, build_smaller, put
from tests.text import split_faults  # room: text
from train import run_settings

FAULTS = [*planted.FAULTS]
FAULTS += split_faults.FAULTS  # room: text


def failures(fault: Fault, settings: list[str]) -> list[dict[str, str]]:
    AcceleratorState._reset_state(reset_partial_state=True)  # the processes stay joined
    with pytest.MonkeyPatch.context() as patch:
        put(patch, "src.tasks.mnist.MnistCnn.__init__", build_smaller)
        put(patch, fault.where, fault.hook)
        run = train.build(run_settings([*settings, *fault.arguments]))
        assert run
        subject = Subject(run, train.train_step, train.evaluate, train.load_checkpoint)
        return [row for row in examine(subject, CHECKS) if row["means"]]


if __name__ == "__main__":
    output, yaml, *settings = sys.argv[1:]
    found: dict[str, list[dict[str, str]]] = {}
    for fault in FAULTS:
        if fault.yaml == yaml:
            found[fault.name] = failures(fault, [*settings, f"--output_dir={Path(output).parent}/{len(found)}"])
    Path(output).write_text(json.dumps(found))
