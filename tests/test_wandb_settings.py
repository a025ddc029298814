"""Artifacts of W&B as a start: what stands in for its server is a folder."""

import shutil
from pathlib import Path
from unittest.mock import Mock

import pytest

from tests.launching import Whole, mistakes
from train import run_settings

EXPECTED = "resume=wandb:me/digits/checkpoint-x:best: cannot be downloaded, "
ARGUMENTS = ("--task.source=digits", "--resume=wandb:me/digits/checkpoint-x:best")


def test_a_run_starts_from_an_artifact(whole: Whole, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The alias becomes a version. Tried without looking for it: it is downloaded a second time."""
    monkeypatch.chdir(tmp_path)
    source = whole("cpu", "--max_steps=4").folder / "checkpoints" / "step_00000004"
    downloads: list[str] = []

    def download(root: str) -> None:
        downloads.append(root)
        shutil.copytree(source, root, dirs_exist_ok=True)

    monkeypatch.setattr("wandb.login", lambda **_: True)
    api = Mock()
    api.artifact.side_effect = lambda name: Mock(qualified_name=name.replace(":best", ":v3"), download=download)
    monkeypatch.setattr("wandb.Api", lambda: api)
    for _ in range(2):
        config = run_settings([*ARGUMENTS, "--max_steps=8"])
        assert config.resume == "artifacts/me/digits/checkpoint-x:v3"
    assert len(downloads) == 1


def test_an_artifact_that_cannot_be_had(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Without credentials, a network, or such an artifact: one line."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("wandb.login", lambda **_: False)
    assert mistakes(*ARGUMENTS) == [f"{EXPECTED}no credentials: `wandb login` first"]
    monkeypatch.setattr("wandb.login", lambda **_: True)
    monkeypatch.setattr("wandb.Api", Mock(side_effect=ValueError("Unable to fetch\nan artifact")))
    assert mistakes(*ARGUMENTS) == [f"{EXPECTED}Unable to fetch an artifact"]


def test_nothing_is_downloaded_for_help_or_beside_other_mistakes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("wandb.login", None)
    with pytest.raises(SystemExit):
        run_settings([*ARGUMENTS, "--help"])
    assert mistakes(*ARGUMENTS, "--sed=1") == ["--sed=1: unknown setting, did you mean seed?"]
