"""Models and data by their name on the Hub, the way back there, and what is said where it cannot be had."""

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import datasets
import huggingface_hub
import pytest
import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from src.config import load_config
from src.export import push_to_hub
from tests.launching import BIN, PROJECT, Launch, Run, run_command
from tests.text import tiny
from tests.text.hub import Hub, hub

CLASSIFIER = ("--task.name=text_classification", "--task.sequence_length=32")
NAMES = ("--task.model=team/model", "--task.dataset=team/data")
RUN = (*CLASSIFIER, *NAMES, "--global_batch_size=8", "--max_steps=3", "--log_every=1")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hub]:
    """With models and datasets of `team`."""
    folder = tmp_path_factory.mktemp("hub")
    model = tiny.bert(folder / "models/team/model")
    shutil.copytree(model, folder / "models/team/weightless", ignore=shutil.ignore_patterns("*.safetensors"))
    code = Path(shutil.copytree(model, folder / "models/team/code"))
    (code / "mine.py").write_text("raise SystemExit('it ran')")
    classes = {"AutoConfig": "mine.Config", "AutoModelForSequenceClassification": "mine.Model"}
    (code / "config.json").write_text(json.dumps({"model_type": "mine", "auto_map": classes}))
    (folder / "datasets/team").mkdir(parents=True)
    tiny.reviews(folder / "datasets/team/data")
    for name, file, text in (
        ("malformed", "train.jsonl", '{"text": "a", "label": 0}\n{"text'),
        ("empty", ".gitattributes", ""),
        ("script", "script.py", "raise SystemExit('it ran')"),
    ):
        (folder / "datasets/team" / name).mkdir()
        (folder / "datasets/team" / name / file).write_text(text)
    with hub(folder) as server:
        yield server


@pytest.fixture(scope="module")
def online(launch: Launch, server: Hub) -> Run:
    """A run from names to a name."""
    return launch("cpu", *RUN, "--push_to_hub=me/mine", real=True, **server.environment).succeeded()


# ----------------------------------------------------------------------------------------------------- there and back
def test_a_model_and_a_dataset_are_found_by_name(online: Run, server: Hub) -> None:
    assert online.summary["eval/examples"] == 37
    asked = [re.sub("/resolve/[^/]+/", " ", request) for request in server.requests]
    assert {"GET /team/model model.safetensors", "GET /datasets/team/data train.tsv"} <= set(asked)


def test_the_second_run_works_offline_from_the_cache(launch: Launch, online: Run, server: Hub) -> None:
    asked = len(server.requests)
    offline = launch("cpu", *RUN, real=True, **(server.environment | {"HF_HUB_OFFLINE": "1"})).succeeded()
    assert len(server.requests) == asked
    assert offline.losses == pytest.approx(online.losses, rel=1e-6)


def test_what_is_pushed_is_what_the_run_exported(online: Run, server: Hub) -> None:
    def content(folder: Path) -> dict[str, bytes]:
        return {file.name: file.read_bytes() for file in folder.iterdir()}

    pushed = content(server.folder / "models/me/mine")
    assert pushed == content(online.folder / "model")
    assert {"config.json", "model.safetensors", "tokenizer.json", "README.md"} <= set(pushed)
    assert b"base_model: team/model" in pushed["README.md"]
    assert b"- team/data" in pushed["README.md"]


def logits(model: Any, tokenizer: Any) -> torch.Tensor:
    with torch.no_grad():
        return model.eval()(**tokenizer(["by the of", "in"], padding=True, return_tensors="pt")).logits


def test_what_is_pushed_loads_with_from_pretrained_and_computes_the_same(online: Run, server: Hub) -> None:
    models = [
        AutoModelForSequenceClassification.from_pretrained(folder)
        for folder in (server.folder / "models/me/mine", online.folder / "model")
    ]
    assert models[0].config.id2label == {0: "falling", 1: "rising"}
    tokenizers = [AutoTokenizer.from_pretrained(model.name_or_path) for model in models]
    assert torch.equal(*map(logits, models, tokenizers))


def test_a_folder_is_a_model_too_such_as_the_one_that_a_run_exported(
    online: Run, server: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path)
    folder, data = online.folder / "model", server.folder / "datasets/team/data"
    arguments = [*CLASSIFIER, f"--task.model={folder}", f"--task.dataset={data}", f"--output_dir={tmp_path}/run"]
    task: Any = load_config(arguments).task
    task.build_datasets()
    exported = AutoModelForSequenceClassification.from_pretrained(folder)
    assert torch.equal(logits(task.build_model(), task._tokenizer), logits(exported, task._tokenizer))
    # The card of what is trained from it names neither: nobody else has these paths.
    assert not {"base_model", "datasets"} & set(task.card())


# ---------------------------------------------------------------------------------------------------------- refusals
End = tuple[int, list[str]]


def ends(*runs: tuple[str, ...], **environment: str) -> list[End]:
    """How train.py would end, with these arguments, before it trains: its exit code, 0 where it would train, and its
    messages. All in one process, as they need the environment from the start, and imports take seconds."""
    code = (
        "import contextlib, io, json, sys\n"
        "from src.config import load_config\n"
        "from src.process import exit_codes\n"
        "for arguments in json.loads(sys.argv[1]):\n"
        "    with contextlib.redirect_stderr(io.StringIO()) as said:\n"
        "        code = 0\n"
        "        try:\n"
        "            with exit_codes():\n"
        "                task = load_config(arguments).task\n"
        "                task.build_datasets(), task.build_model()\n"
        "        except SystemExit as end:\n"
        "            code = end.code\n"
        "        except Exception as error:\n"
        "            code = f'a traceback: {error!r}'\n"
        "    lines = [line for line in said.getvalue().splitlines() if line.startswith('train.py: ')]\n"
        "    print(json.dumps([code, [line.removeprefix('train.py: ') for line in lines]]))\n"
    )
    arguments = [[*CLASSIFIER, *run] for run in runs]
    run = run_command([sys.executable, "-c", code, json.dumps(arguments)], Path(), PROJECT, **environment).succeeded()
    return [(code, lines) for code, lines in map(json.loads, run.stdout.splitlines())]


UNUSABLE = {
    "unknown model": (
        ("--task.model=team/unknown", "--task.dataset=team/data"),
        r"task\.model=team/unknown: no such folder here, and not available on the Hub \(",
    ),
    "unknown dataset": (
        ("--task.model=team/model", "--task.dataset=team/unknown"),
        r"task\.dataset=team/unknown: no such file or folder here, and not available on the Hub \(",
    ),
    "unknown revision": ((*NAMES, "--task.revision=v9"), r"task\.model=team/model: .*v9"),
    "model without weights": (
        ("--task.model=team/weightless", "--task.dataset=team/data"),
        r"task\.model=team/weightless: .*model\.safetensors",
    ),
    "model with code": (
        ("--task.model=team/code", "--task.dataset=team/data"),
        r"task\.model=team/code: wants to run code of its own, which is not allowed here",
    ),
    "dataset without files": (
        ("--task.model=team/model", "--task.dataset=team/empty"),
        r"task\.dataset=team/empty: .*doesn't contain any data files",
    ),
    "dataset with code": (
        ("--task.model=team/model", "--task.dataset=team/script"),
        r"task\.dataset=team/script: .*script\.py",
    ),
    "unknown subset": ((*NAMES, "--task.dataset_config=large"), r"task\.dataset_config=large: .*default"),
    "malformed file": (
        ("--task.model=team/model", "--task.dataset=team/malformed"),
        r"task\.dataset=team/malformed: (?!no such file).*JSON parse error",
    ),
}  # fmt: skip


@pytest.fixture(scope="module")
def refusals(server: Hub) -> dict[str, End]:
    found = ends(*[arguments for arguments, _ in UNUSABLE.values()], **server.environment)
    return dict(zip(UNUSABLE, found, strict=True))


@pytest.mark.parametrize("name", UNUSABLE)
def test_what_the_hub_has_not_or_in_no_usable_form_is_one_line(refusals: dict[str, End], name: str) -> None:
    code, lines = refusals[name]
    assert code == 2
    (says,) = lines
    assert re.match(UNUSABLE[name][1], says)


def test_offline_an_unknown_name_is_one_line_and_what_it_advises_works(server: Hub, tmp_path: Path) -> None:
    data = tiny.reviews(tmp_path / "data")
    online = os.environ | server.environment | {"HF_HOME": str(tmp_path), "PATH": f"{BIN}:{os.environ['PATH']}"}
    offline = server.environment | {"HF_HOME": str(tmp_path), "HF_HUB_OFFLINE": "1"}
    (code, model), (same_code, dataset) = ends(
        ("--task.model=team/model", f"--task.dataset={data}"), NAMES, **offline
    )  # the data come first
    assert (code, same_code) == (2, 2)
    for name, lines in (("task.model=team/model", model), ("task.dataset=team/data", dataset)):
        (says,) = lines
        assert says.startswith(f"{name}: no such ")
        assert says.endswith("and set HF_HUB_OFFLINE=1")
        (command,) = re.findall("`(.+?)`", says)
        subprocess.run(command, shell=True, check=True, capture_output=True, env=online)
    assert ends(NAMES, **offline) == [(0, [])]


# --------------------------------------------------------------------------------------------------------- uploading
@pytest.mark.parametrize(
    ("name", "environment", "says"),
    [
        ("me/mine", {"HF_TOKEN": ""}, "push_to_hub=me/mine: no credentials; `hf auth login` first"),
        ("mine", {}, "push_to_hub=mine: must be USER/NAME"),
        (
            "me/mine",
            {"HF_HUB_OFFLINE": "1"},
            "push_to_hub=me/mine: HF_HUB_OFFLINE is set; unset it, or take push_to_hub out",
        ),
    ],
    ids=["without credentials", "without a user", "offline"],
)
def test_an_upload_that_must_fail_is_refused_before_training(
    server: Hub, tmp_path: Path, name: str, environment: dict[str, str], says: str
) -> None:
    command = [sys.executable, "train.py", *RUN, f"--push_to_hub={name}", f"--output_dir={tmp_path}/run"]
    run = run_command(command, tmp_path / "run", PROJECT, **(server.environment | environment))
    assert (run.exit_code, run.stderr) == (2, f"train.py: {says}\n")
    assert not run.folder.exists()


@pytest.mark.parametrize("failure", ["refused", "unreachable"])
def test_an_upload_that_fails_after_training_says_how_to_repeat_it(
    server: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failure: str
) -> None:
    # The stand-in answers 401 where there is no token, as if it had expired during the run; nobody listens on port 9.
    endpoint = {"refused": server.url, "unreachable": "http://127.0.0.1:9"}[failure]
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", endpoint)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(huggingface_hub.constants, "HF_TOKEN_PATH", str(tmp_path / "none"))
    monkeypatch.setenv("HF_TOKEN", "dummy")
    config = load_config([f"--output_dir={tmp_path}/run", "--push_to_hub=me/other"])
    monkeypatch.delenv("HF_TOKEN")
    folder = config.folder / "model"
    folder.mkdir(parents=True)
    with pytest.raises(SystemExit) as end:
        push_to_hub(config)
    says = str(end.value.code)  # text: it is printed, and the exit code is 1
    assert says.startswith("train.py: push_to_hub=me/other: ")
    assert says.endswith(f"; the run is complete, upload its model with `hf upload me/other {folder}`")
    assert "\n" not in says
