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
    """The alias becomes a version, which is downloaded once. Tried without looking for
    it: it is downloaded a second time."""
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


def test_a_model_is_fine_tuned_from_an_artifact(  # room: text
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As docs/tracking.md has it. Tried without: "no such folder"."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "rows.jsonl").write_text('{"text": "a"}\n')
    monkeypatch.setattr("wandb.login", lambda **_: True)
    artifact = Mock(
        qualified_name="me/digits/model:v1", download=lambda root: Path(root).mkdir(parents=True, exist_ok=True)
    )
    monkeypatch.setattr("wandb.Api", lambda: Mock(artifact=lambda _: artifact))
    words = ["--task.name=causal_lm", "--task.dataset=rows.jsonl", "--task.model=wandb:me/digits/model:latest"]
    assert run_settings(words).task.model == "artifacts/me/digits/model:v1"
    assert mistakes(*words, "--sed=1") == ["--sed=1: unknown setting, did you mean seed?"]


def test_an_artifact_that_cannot_be_had(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Without credentials, a network, or such an artifact: one line."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("wandb.login", lambda **_: False)
    assert mistakes(*ARGUMENTS) == [f"{EXPECTED}no credentials: `wandb login` first"]
    monkeypatch.setattr("wandb.login", lambda **_: True)
    monkeypatch.setattr("wandb.Api", Mock(side_effect=ValueError("Unable to fetch\nan artifact")))
    assert mistakes(*ARGUMENTS) == [f"{EXPECTED}Unable to fetch an artifact"]


def test_other_settings_may_be_called_wandb(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tried with any setting that begins with a scheme: it is downloaded."""
    monkeypatch.setattr("wandb.login", None)
    words = ("--task.source=digits", "--wandb.project=wandb")
    assert [run_settings([*words, f"--run_name={name}"]).run_name for name in ("wandb", "wandb:a")] == [
        "wandb",
        "wandb:a",
    ]


def test_nothing_is_downloaded_for_help_or_beside_other_mistakes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("wandb.login", None)
    with pytest.raises(SystemExit):
        run_settings([*ARGUMENTS, "--help"])
    assert mistakes(*ARGUMENTS, "--sed=1") == ["--sed=1: unknown setting, did you mean seed?"]
