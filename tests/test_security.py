"""Loading a checkpoint executes nothing, whatever lies in it, and no secret gets into what a run writes."""

import contextlib
import os
import pickle
import re
import shutil
import tomllib
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import SafetensorError
from torch.distributed.checkpoint import CheckpointException

from src.checkpoint.compatibility import read_state
from src.checkpoint.integrity import problems
from src.checkpoint.rng import restore_random_state
from src.checkpoint.tensors import load_tensors
from src.tasks.mnist import MnistCnn
from tests.faults.runs import ALL, TINY, relist
from tests.launching import PROJECT, WANDB, Launch, Whole

FILES = ["shard-00001-model-00001-of-00001.safetensors", "rng_00001.json", "state.json", "manifest.json"]


class Payload:
    """Unpickled, it writes a file."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def __reduce__(self) -> tuple:
        return os.system, (f"touch {self.file}",)


@pytest.fixture(scope="module")
def checkpoint(whole: Whole) -> Path:
    return whole("cpu", *ALL).folder / "checkpoints" / "step_00000014"


@pytest.mark.parametrize("is_listed", [False, True], ids=["planted", "with a manifest to match"])
@pytest.mark.parametrize("name", [*FILES, ".metadata"])
def test_a_payload_in_any_file_stays_inert(checkpoint: Path, tmp_path: Path, name: str, is_listed: bool) -> None:
    """However it is read; and it is reported, unless the manifest matches. Tried with pickle.loads: it runs."""
    proof, checkpoint = tmp_path / "executed", shutil.copytree(checkpoint, tmp_path / "step_00000014")
    payload = pickle.dumps(Payload(proof))
    (checkpoint / name).write_bytes(payload)
    if is_listed and name != "manifest.json":
        relist(checkpoint, name)
    else:
        assert any(name in problem for problem in problems(checkpoint))
    for read in (
        lambda: read_state(checkpoint),
        lambda: load_tensors(checkpoint, MnistCnn()),
        lambda: restore_random_state(checkpoint / "rng_00001.json", torch.device("cpu")),
        lambda: list(problems(checkpoint)),
    ):
        with contextlib.suppress(ValueError, SafetensorError, CheckpointException):
            read()
    assert not proof.exists()
    pickle.loads(payload)
    assert proof.exists(), "the payload is one"


def test_nothing_in_the_project_unpickles() -> None:
    for path in [PROJECT / "train.py", *(PROJECT / "src").rglob("*.py")]:
        text = path.read_text()
        for word in ("pickle", "torch.load", "weights_only", "allow_pickle", "trust_remote_code=True", "joblib"):
            assert word not in text, f"{path}: {word}"


def test_no_secret_is_written_anywhere(launch: Launch) -> None:
    names = ("WANDB_API_KEY", "HF_TOKEN", "AWS_SECRET_ACCESS_KEY", "MY_PASSWORD")
    secrets: dict[str, Any] = {name: f"sentinel-{name.lower()}-0123456789abcdef0123456789" for name in names}
    run = launch("cpu", *TINY, "--max_steps=4", wandb="offline", **secrets).succeeded()
    files = [path for path in run.folder.rglob("*") if path.is_file()]
    assert any(path.suffix == ".wandb" for path in files) == WANDB
    for written in ((run.stdout + run.stderr).encode(), *(path.read_bytes() for path in files)):
        assert b"sentinel-" not in written


# ------------------------------------------------------------ links and locks in shared folders

# ------------------------------------------------------------ damaged files of a run

# ------------------------------------------------------------ secrets in URLs

# ------------------------------------------------------------ control characters, names, printed commands

# ------------------------------------------------------------ supply chain


@pytest.mark.parametrize("file", sorted((PROJECT / ".github/workflows").iterdir()), ids=lambda file: file.name)
def test_a_workflow_runs_actions_of_known_commits_without_rights(file: Path) -> None:
    """A tag can be moved to other code, as that of tj-actions/changed-files was in 2025. Tried with checkout@v7."""
    text = file.read_text()
    actions = re.findall(r"uses: (.*)", text)
    assert actions
    assert all(re.fullmatch(r"[\w-]+/[\w-]+@[0-9a-f]{40} # v\d+\.\d+\.\d+", action) for action in actions)
    assert text.count("persist-credentials: false") == text.count("actions/checkout@")
    assert "\npermissions:\n  contents: read\n" in text
    assert "pull_request_target" not in text


def test_what_is_pinned_is_raised() -> None:
    """The image by its digest, and each file that `uv sync` installs by its hash."""
    images = re.findall(r"(?m)^FROM (\S+)", (PROJECT / "Dockerfile").read_text())
    assert re.fullmatch(r"python:3\.\d+-slim@sha256:[0-9a-f]{64}", images[0])
    assert images[1:] == ["base"]
    packages = tomllib.loads((PROJECT / "uv.lock").read_text())["package"]
    files = [file for package in packages for file in (*package.get("wheels", ()), package.get("sdist")) if file]
    assert len(files) > 1000
    assert all(file["hash"].startswith("sha256:") for file in files)
    assert "run: uv sync --locked" in (PROJECT / ".github/workflows/locked.yml").read_text()
    raised = re.findall(r"package-ecosystem: (\S+)", (PROJECT / ".github/dependabot.yml").read_text())
    assert sorted(raised) == ["docker", "github-actions", "pip", "uv"]


def test_no_secret_gets_into_the_image() -> None:
    """Tried without `**/.env*`."""
    ignored = (PROJECT / ".dockerignore").read_text().split()
    assert {"**/.env*", "**/.netrc", "**/*.pem", "**/*.key", "**/.ssh"} <= {*ignored}
