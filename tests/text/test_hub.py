"""Models and data by their name on the Hub, the way back there, and what is said where it cannot be had."""

import re
import sys
from collections.abc import Iterator
from pathlib import Path

import huggingface_hub
import pytest

from src.checkpoint.folder import run_settings
from src.checkpoint.hub import push_to_hub
from tests.launching import PROJECT, Run, mistakes, run_command
from tests.text import tiny
from tests.text.hub import Hub, hub

CLASSIFIER = ("--task.name=text_classification", "--task.sequence_length=32")
NAMES = ("--task.model=team/model", "--task.dataset=team/data")
RUN = (*CLASSIFIER, *NAMES, "--global_batch_size=8", "--max_steps=3", "--log_every=1")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hub]:
    """With a model and a dataset of `team`."""
    folder = tmp_path_factory.mktemp("hub")
    tiny.bert(folder / "models/team/model")
    (folder / "datasets/team").mkdir(parents=True)
    tiny.reviews(folder / "datasets/team/data")
    with hub(folder) as server:
        yield server


def trained(server: Hub, folder: Path, *arguments: str, **environment: str) -> Run:
    """A run from names, in a process of its own: the libraries read the environment when they are imported."""
    command = [sys.executable, "train.py", *RUN, "--wandb.mode=disabled", f"--output_dir={folder}", *arguments]
    return run_command(command, folder, PROJECT, **(server.environment | environment)).succeeded()


@pytest.fixture(scope="module")
def online(server: Hub, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A run from names to a name."""
    return trained(server, tmp_path_factory.mktemp("online") / "run", "--push_to_hub=me/mine")


# ----------------------------------------------------------------------------------------------------- there and back
@pytest.mark.slow
def test_a_model_and_a_dataset_are_found_by_name_and_the_second_time_offline(
    online: Run, server: Hub, tmp_path: Path
) -> None:
    assert online.summary["eval/examples"] == 37
    asked = [re.sub("/resolve/[^/]+/", " ", request) for request in server.requests]
    assert {"GET /team/model model.safetensors", "GET /datasets/team/data train.tsv"} <= set(asked)
    offline = trained(server, tmp_path / "run", HF_HUB_OFFLINE="1")
    assert len(server.requests) == len(asked)
    assert offline.losses == pytest.approx(online.losses, rel=1e-6)


def test_what_is_pushed_is_what_the_run_exported(  # room: hub
    online: Run, server: Hub
) -> None:
    folders = server.folder / "models/me/mine", online.folder / "model"
    pushed, exported = ({file.name: file.read_bytes() for file in folder.iterdir()} for folder in folders)
    assert pushed == exported
    assert {"config.json", "model.safetensors", "tokenizer.json", "README.md"} <= set(pushed)
    assert b"base_model: team/model" in pushed["README.md"]
    assert b"- team/data" in pushed["README.md"]


# --------------------------------------------------------------------------------------------------------- uploading
@pytest.mark.parametrize(  # room: hub
    ("name", "is_offline", "says"),
    [
        ("me/mine", False, "push_to_hub=me/mine: no credentials; `hf auth login` first"),
        ("mine", False, "push_to_hub=mine: must be USER/NAME"),
        ("me/mine", True, "push_to_hub=me/mine: HF_HUB_OFFLINE is set; unset it, or take push_to_hub out"),
    ],
)
def test_an_upload_that_must_fail_is_refused(  # room: hub
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, is_offline: bool, says: str
) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", is_offline)
    monkeypatch.setattr(huggingface_hub.constants, "HF_TOKEN_PATH", str(tmp_path / "none"))
    monkeypatch.delenv("HF_TOKEN", raising=False)
    assert mistakes(f"--output_dir={tmp_path}/run", f"--push_to_hub={name}") == [says]


def test_an_upload_that_fails_after_training_says_how_to_repeat_it(  # room: hub
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", "http://127.0.0.1:9")  # where nobody listens
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setenv("HF_TOKEN", "dummy")
    config = run_settings([f"--output_dir={tmp_path}/run", "--push_to_hub=me/other"])
    with pytest.raises(SystemExit) as end:
        push_to_hub(config)
    says = str(end.value.code)  # text: it is printed, and the exit code is 1
    assert says.startswith("train.py: push_to_hub=me/other: ")
    assert says.endswith(f"; the run is complete, upload its model with `hf upload me/other {config.folder}/model`")
    assert "\n" not in says
