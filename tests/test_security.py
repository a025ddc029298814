"""Loading a checkpoint executes nothing, whatever lies in it, and no secret gets into what a run writes."""

import ast
import contextlib
import os
import pickle
import shutil
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from ruamel.yaml.error import YAMLError
from safetensors import SafetensorError
from torch.distributed.checkpoint import CheckpointException

from src.checkpoint.compatibility import read_state
from src.checkpoint.integrity import problems
from src.checkpoint.rng import restore_random_state
from src.checkpoint.tensors import load_tensors
from src.config.settings import read_arguments, read_yaml
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


CALLS = {"from_pretrained": "trust_remote_code=False", "from_config": "trust_remote_code=False", "open": "formats="}
NO_CODE = ("GenerationConfig", "PeftConfig", "PeftModel")
"""Classes of which a model can bring none of its own."""


def test_no_model_brings_its_own_code_and_no_picture_starts_a_program() -> None:
    """Left out, trust_remote_code asks whoever writes to standard input; and Pillow starts Ghostscript."""
    found = 0
    for path in [
        PROJECT / "train.py",
        *(p for part in ("src", "examples", "benchmarks") for p in (PROJECT / part).rglob("*.py")),
    ]:
        for call in ast.walk(ast.parse(path.read_text())):
            if isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute) and call.func.attr in CALLS:
                owner = ast.unparse(call.func.value).rpartition(".")[2]
                if owner not in NO_CODE and (call.func.attr != "open" or owner == "Image"):
                    found += 1
                    words = [ast.unparse(keyword) for keyword in call.keywords]
                    assert any(word.startswith(CALLS[call.func.attr]) for word in words), f"{path}: {ast.unparse(call)}"
    assert found


LAUGHS = "a: &a [x, x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"{name}: &{name} [{', '.join([f'*{before}'] * 10)}]\n" for before, name in pairwise("abcdefghi")
)
MERGES = (
    LAUGHS.replace("a: &a [x, x, x, x, x, x, x, x, x, x]", "a: &a {x: 1}").replace(" [", " {<<: [").replace("]", "]}")
)


@pytest.mark.parametrize(
    "text",
    [LAUGHS, MERGES, f"a: &a {'x' * 5000}\nb: [{'*a, ' * 100}]", "a: 1\n" * 100_000, "# " + "x" * 400_000],
    ids=["aliases", "merged", "a long text", "many lines", "a comment"],
)
def test_a_yaml_that_stands_for_gigabytes_is_refused(tmp_path: Path, text: str) -> None:
    """Before it is built: nine lines would be 10^9 values. Tried without: a minute and 6 GB, or days where they are
    merged. In a file, and on the command line, where it is a text."""
    says = "has more than 300,000 characters, with each alias written out"
    with pytest.raises(YAMLError, match=f"^{says}$"):
        read_yaml(text)
    (tmp_path / "a.yaml").write_text(text)
    mistakes: list[str] = []
    values, _ = read_arguments([f"--config={tmp_path}/a.yaml", f"--run_name={text}"], mistakes)
    assert values == {"run_name": text}
    assert mistakes == [f"--config={tmp_path}/a.yaml: cannot be read as yaml, {says}"]


def test_aliases_of_a_config_are_read() -> None:
    text = "a: &a {x: 1, y: [&b 2, *b]}\nc: {<<: *a, x: 3}\nd: [*a, *a]"
    a = {"x": 1, "y": [2, 2]}
    assert read_yaml(text) == {"a": a, "c": {"x": 3, "y": [2, 2]}, "d": [a, a]}
    with pytest.raises(YAMLError, match="^Circular reference detected$"):
        read_yaml("a: &a {b: [*a]}")


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
