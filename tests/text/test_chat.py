"""`make chat`: the conversations that come with the project, and a chat model by its name on the Hub."""

import json
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest

from src.config.errors import UserError
from src.tasks.text.causal_lm import CausalLM
from src.tools.generate import main
from tests.launching import PROJECT, Launch
from tests.text.hub import serving
from tests.text.stand_in import NAME, untrained

CONFIG = PROJECT / "configs" / "chat_lora.yaml"


def test_the_conversations_are_200_to_400_answers_about_the_project() -> None:
    chats = [json.loads(line)["messages"] for line in (PROJECT / "examples/chats.jsonl").read_text().splitlines()]
    questions = [message["content"] for chat in chats for message in chat if message["role"] == "user"]
    answers = [message["content"] for chat in chats for message in chat if message["role"] == "assistant"]
    assert 200 <= len(answers) == len(questions) == len(set(questions)) <= 400
    assert "What does --check do?" in questions
    for chat in chats:
        roles = [message["role"] for message in chat if message["role"] != "system"]
        assert roles == ["user", "assistant"] * (len(roles) // 2)


def test_a_model_from_the_hub_is_tuned_and_asked_before_and_after(
    launch: Launch, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """By its name, through the real launcher and the Hub's client, from a stand-in for the Hub, with our weights."""
    home = tmp_path / "home"
    with serving({NAME: untrained(tmp_path / "model")}, home) as environment:
        few = ("--task.name=causal_lm", "--max_steps=3", "--log_every=1", "--trackers=[]")
        run = launch("cpu", f"--config={CONFIG}", *few, real=True, **environment).succeeded()
    assert "of them trained" in run.stdout
    assert json.loads((run.folder / "model/adapter_config.json").read_text())["base_model_name_or_path"] == NAME
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(home / "hub"))
    question = ["--prompt=What does --check do?", "--temperature=0", "--max_new_tokens=20"]
    main([str(run.folder), *question, "--compare"])
    before, after = capsys.readouterr().out.removeprefix("before:\n").split("after:\n")
    main([str(run.folder), *question])
    assert capsys.readouterr().out == after
    main([str(tmp_path / "model"), *question])
    assert capsys.readouterr().out == before
    with pytest.raises(UserError, match="^--compare: this model has no adapters to leave out$"):
        main([str(tmp_path / "model"), *question, "--compare"])


def test_without_the_hub_one_line_says_how_to_give_a_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    task: Any = CausalLM(model="team/none", dataset="a.jsonl", sequence_length=16)
    for load in (task.load_config, task.load_tokenizer):
        with pytest.raises(UserError) as error:
            load()
        says = "the Hub cannot be reached; give a folder that has it, --task.model=FOLDER (make chat MODEL=FOLDER)"
        assert str(error.value) == f"task.model=team/none: {says}"
