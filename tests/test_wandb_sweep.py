"""The sweep files, as W&B itself reads them: its agent fills in the same commands as python -m src.tools.sweep."""

from importlib import import_module
from pathlib import Path

import optuna
import pytest
import yaml

from src.tools.sweep import command_of, read_sweep
from tests.launching import PROJECT
from train import run_settings


@pytest.mark.parametrize("file", sorted((PROJECT / "sweeps").glob("*.yaml")), ids=lambda file: file.name)
def test_wandbs_agent_starts_the_same_runs(file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With settings that are valid. Tried with ${args} left out of a file, and with a setting that is unknown."""
    (tmp_path / "configs").symlink_to(PROJECT / "configs")
    (tmp_path / "data/tinyshakespeare").mkdir(parents=True)
    (tmp_path / "data/tinyshakespeare/input.txt").write_text("which the header says how to get")
    monkeypatch.chdir(tmp_path)
    sweep = read_sweep(str(file))
    settings = sweep.choose(optuna.create_study(sampler=sweep.sampler()).ask())
    ours = command_of(sweep, settings, Path("runs/s/trial-00"), [])
    content = yaml.safe_load(file.read_text())
    theirs = import_module("wandb.sdk.launch.sweeps.utils")  # two seconds, which only this test needs
    words = theirs.create_sweep_command_args({"args": {name: {"value": value} for name, value in settings.items()}})
    words |= {"env": ["/usr/bin/env"], "interpreter": ["python"], "program": [content["program"]]}  # as wandb_agent.py
    command = [
        text for word in theirs.create_sweep_command(content["command"]) for text in words.get(word[2:-1], [word])
    ]
    assert {*ours} - {*command} == {"--run_name=s-trial-00", "--output_dir=runs/s/trial-00"}
    assert {*command} <= {*ours}
    run_settings(command[command.index("train.py") + 1 :])
