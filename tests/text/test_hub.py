"""Models and data by their name on the Hub, and the way there, asked of a stand-in for it on this machine."""

import shutil
import time
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest

from src.checkpoint.export import push_to_hub
from src.config.errors import UserError
from src.tasks.text.files import can_reach_hub
from src.tasks.text.meta_loading import weight_files
from tests.launching import Launch, mistakes
from tests.text import tiny
from tests.text.hub import serving
from train import run_settings


def test_a_fetched_model_is_found(models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Offline. Its card names it, and the data."""
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    fetched = tmp_path / "models--team--model"
    shutil.copytree(models / "llama", fetched / "snapshots" / "0123abcd")
    tiny.write({"models--team--model/refs/v2": "0123abcd"})
    named = {"model": "team/model", "revision": "v2"}
    task, here = tiny.task(**named, dataset="team/data"), tiny.task(model=f"{models}/llama")
    weights, local = (of.build_model().lm.state_dict() for of in (task, here))
    assert all(weight.equal(local[name]) for name, weight in weights.items())
    assert weight_files("team/model", "v2") == [str(fetched / "snapshots/0123abcd/model.safetensors")]
    assert {"base_model": "team/model", "datasets": ["team/data"]}.items() <= task._cards()[""].items()
    assert "datasets" not in tiny.task(**named, dataset="s3://team/data")._cards()[""]  # the Hub refuses it


def test_a_dataset_is_read_as_its_files_on_the_hub_say(launch: Launch, tmp_path: Path) -> None:
    """Or as `hf download` leaves it. Tried with load_dataset: 2024-01-04 00:00:00."""
    tiny.write({
        "data/README.md": "---\nconfigs:\n- config_name: small\n  data_files:\n  - split: train\n    path: a.jsonl\n"
        "  - split: test\n    path: b.jsonl\n- config_name: large\n  data_files: c.jsonl\n---\n",
        "data/a.jsonl": '{"text": "2024-01-04"}\n\n{"text": "2024-01-04"}\n',
        "data/b.jsonl": '{"text": "1.10"}\n',
        "data/c.jsonl": '{"text": "large"}\n',
    })  # fmt: skip
    with serving({"team/data": tmp_path / "data"}, tmp_path / "home") as before:
        for dataset in ("team/data", tmp_path / "data"):
            of_small = ("--task.name=causal_lm", f"--task.dataset={dataset}", "--task.dataset_config=small")
            run = launch("cpu", *of_small, *tiny.NEW_LLAMA, "--dry-run", "--max_steps=1", before=before).succeeded()
            assert run.stdout.count("⟦2024-01-04<|endoftext|>⟧") == 2
            assert "large" not in run.stdout
            assert "eval       sequences 1, tokens 5, " in run.stdout


def test_without_the_hub_one_line_says_so_within_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its client would ask six times for each file."""
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", "http://127.0.0.1:9")
    can_reach_hub.cache_clear()
    task = tiny.task(model="team/none", dataset="a.jsonl")
    began = time.monotonic()
    for load in (task.load_config, task.load_tokenizer):
        with pytest.raises(UserError) as error:
            load()
        says = "the Hub cannot be reached; give a folder that has it, --task.model=FOLDER"
        assert str(error.value) == f"task.model=team/none: {says}"
    assert time.monotonic() - began < 20
    can_reach_hub.cache_clear()


@pytest.fixture
def online(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(huggingface_hub.constants, "HF_TOKEN_PATH", str(tmp_path / "none"))
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", "http://127.0.0.1:9")  # where nobody listens
    monkeypatch.setenv("HF_TOKEN", "dummy")


@pytest.mark.usefixtures("online")
def test_an_upload_that_must_fail_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    assert mistakes("--push_to_hub=mine") == ["push_to_hub=mine: must be USER/NAME"]
    monkeypatch.delenv("HF_TOKEN")
    assert mistakes("--push_to_hub=me/mine") == ["push_to_hub=me/mine: no credentials; run `hf auth login`"]
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    says = "push_to_hub=me/mine: HF_HUB_OFFLINE is set; unset it, or remove push_to_hub"
    assert mistakes("--push_to_hub=me/mine") == [says]


@pytest.mark.usefixtures("online")
def test_what_was_exported_is_uploaded_and_a_failure_says_how_to_repeat_it(
    made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Merged weights in a repository of their own: in that of the adapters, nobody would look for them."""
    config = run_settings([
        f"--output_dir={tmp_path}/run", "--push_to_hub=me/other", "--task.name=causal_lm", "--task.lora.r=4",
        f"--task.model={made}/models/llama", f"--task.dataset={made}/questions.jsonl", "--task.lora.merge=true",
    ])  # fmt: skip
    tiny.write({f"{config.folder}/model/{part}README.md": "a card" for part in ("", "merged/")})
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)  # as where it was away at the start
    with pytest.raises(SystemExit) as end:
        push_to_hub(config)
    says = str(end.value.code)  # text: it is printed, and the exit code is 1
    command = f"hf upload me/other {config.folder}/model --private --exclude 'merged/*'"
    expected = f"train.py: push_to_hub=me/other: *refused*; the run is complete, upload its model with `{command}`"
    assert fnmatchcase(says, expected)
    assert "\n" not in says
    asked: list[Any] = []
    monkeypatch.setattr(huggingface_hub.HfApi, "create_repo", lambda _, name, **more: asked.append((name, more)))
    monkeypatch.setattr(huggingface_hub.HfApi, "upload_folder", lambda _, **more: asked.append(more))
    push_to_hub(config)
    assert asked == [
        ("me/other", {"private": True, "exist_ok": True}),
        {"repo_id": "me/other", "folder_path": config.folder / "model", "commit_message": config.run_name,
         "ignore_patterns": ["merged/*"]},
    ]  # fmt: skip
    command = f"hf upload me/other-merged {config.folder}/model/merged --private"
    assert f"without merged, which `{command}` uploads" in capfd.readouterr().out
