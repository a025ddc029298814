"""Examines one run in this process again and again, each time with another fault planted in it.

    accelerate launch … tests/check/examine.py OUTPUT.json SETTINGS…

It writes, for each of tests.check.planted.ALONE by name and for the project as it is (""), the rows that failed.
"""

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import train
from src.check import examine
from src.check.subject import Subject
from src.checkpoint.folder import run_settings
from src.training.progress import Progress
from tests.check.planted import ALONE, smaller

EXAMINED = ("Data", "Same start", "Steps", "Evaluation", "Checkpoint")


def main(output: Path, settings: list[str]) -> None:
    run = train.build(run_settings(settings))
    assert run
    weights = {name: tensor.clone() for name, tensor in run.model.state_dict().items()}

    def failures(*arguments: str) -> list[dict[str, str]]:
        config = run_settings([*settings, *arguments])
        run.model.load_state_dict(weights)
        optimizers = train.build_optimizers(config.optim, run.model)
        examined = replace(run, config=config, optimizers=optimizers, progress=Progress(loss_scale=1.0))
        subject = Subject(examined, train.train_step, train.evaluate, train.load_checkpoint)
        return [row for row in examine(subject, EXAMINED) if row["means"]]

    found: dict[str, Any] = {"": failures()}
    for fault in ALONE.values():
        with pytest.MonkeyPatch.context() as patch:
            fault.plant(patch)
            found[fault.name] = failures(*fault.arguments)
    output.write_text(json.dumps(found))


if __name__ == "__main__":
    with pytest.MonkeyPatch.context() as patch:
        smaller(patch)
        main(Path(sys.argv[1]), sys.argv[2:])
