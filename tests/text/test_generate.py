"""python -m src.tools.generate: what transformers generates of the export, from wherever the model comes."""

import io
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers import AutoModelForCausalLM, AutoTokenizer

from src.config.errors import UserError
from src.tools.generate import main
from tests.launching import slow
from tests.text.conftest import Trained

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")  # in this process, to read
TEMPLATE = (
    "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}{% if add_generation_prompt %}[a]{% endif %}"
)


@pytest.fixture
def folder(trained: Trained) -> str:
    """Of a run whose model sees 256 tokens."""
    return str(trained("lm", "fsdp").folder)


@pytest.fixture
def streamed(monkeypatch: pytest.MonkeyPatch) -> list[list[int]]:
    """The tokens that pass through the streamer: in turns those of a prompt and those of what follows it."""
    seen: list[list[int]] = []

    class Streamer(transformers.TextStreamer):
        def put(self, value: torch.Tensor) -> None:
            if self.next_tokens_are_prompt:
                seen.extend((value.flatten().tolist(), []))
            else:
                seen[-1].extend(value.tolist())
            super().put(value)

    monkeypatch.setattr("src.tools.generate.TextStreamer", Streamer)
    return seen


@pytest.mark.parametrize("kind", ["lm", "lm with adapters", slow("chat")])
def test_greedy_continuations_are_those_of_transformers(trained: Trained, streamed: list[list[int]], kind: str) -> None:
    """Token by token, of the run, a checkpoint and the merged model. Tried without loading a checkpoint's weights or
    adapters."""
    run = trained(kind, "fsdp")
    exported = run.folder / "model"
    tokenizer: Any = AutoTokenizer.from_pretrained(exported)
    model: Any = AutoModelForCausalLM.from_pretrained(exported, dtype=torch.float32)
    prompt, tokens = "Q: the", tokenizer("Q: the", return_tensors="pt")["input_ids"]
    if kind == "chat":
        chat = [{"role": "user", "content": prompt}]
        asked = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=True)
        tokens = asked["input_ids"]
    expected = model.generate(input_ids=tokens, do_sample=False, max_new_tokens=40)[0].tolist()
    for source in (run.folder, max(run.folder.glob("checkpoints/*")), exported / "merged"):
        if source.exists():  # or there is nothing to merge
            streamed.clear()
            main([str(source), f"--prompt={prompt}", "--temperature=0", "--max_new_tokens=40"])
            assert [*streamed[0], *streamed[1]] == expected
            assert len(streamed[1]) > 5


def test_the_continuation_is_printed_and_ends_at_the_models_limit(
    folder: str, streamed: list[list[int]], capsys: pytest.CaptureFixture[str]
) -> None:
    """With the same seed the same. Tried without the limit: more tokens than the model sees."""
    printed = set()
    for _ in range(2):
        main([folder, "--prompt", "x" * 250, "--max_new_tokens", "1000", "--seed", "3"])
        printed.add(capsys.readouterr().out)
    tokenizer: Any = AutoTokenizer.from_pretrained(f"{folder}/model")
    assert printed == {tokenizer.decode(streamed[1], skip_special_tokens=True) + "\n"}
    assert len(streamed[0]) + len(streamed[1]) <= 256


@pytest.mark.parametrize(
    ("template", "says", "begins", "goes_on"),
    [
        (None, "no chat template: each line is completed by itself", "<|endoftext|>the", "<|endoftext|>of"),
        (TEMPLATE, "chat (", "[user]the[a]", "[user]the[assistant]ANSWER[user]of[a]"),
    ],
    ids=["lines", "chat"],
)
def test_a_chat_has_its_history_and_lines_have_none(
    folder: str, streamed: list[list[int]], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch,
    template: str | None, says: str, begins: str, goes_on: str,
) -> None:  # fmt: skip
    """Until Ctrl-D. The byte tokenizer's own template, which every model on bytes has, makes no chat."""
    model = Path(shutil.copytree(f"{folder}/model", "model"))
    if template:
        (model / "chat_template.jinja").write_text(template)
    tokenizer: Any = AutoTokenizer.from_pretrained(model)
    monkeypatch.setattr(sys, "stdin", io.StringIO("the\n\nof\n"))
    with pytest.raises(EOFError):
        main([str(model), "--temperature=0", "--max_new_tokens=5"])
    first, answer, second, _ = (tokenizer.decode(tokens) for tokens in streamed)
    assert capsys.readouterr().out.startswith(says)
    assert first == begins
    assert second == goes_on.replace("ANSWER", answer.removesuffix(tokenizer.eos_token))


def test_mistakes_are_one_line(folder: str, models: Path) -> None:
    """Tried without: a classifier talks with a head of random weights."""
    classifier = transformers.AutoModelForSequenceClassification.from_pretrained(models / "bert")
    classifier.save_pretrained("classifier")
    AutoTokenizer.from_pretrained(models / "bert").save_pretrained("classifier")
    for arguments, says in (
        ([folder, "--prompt="], "--prompt is empty"),
        (
            [folder, "--prompt", "x" * 300],
            "the prompt and the chat so far have 301 tokens, but the model's limit is 256",
        ),
        ([folder, "--prompt=x", "--temperature=-1"], "has to be a strictly positive float"),
        (["nothing", "--prompt=x"], "neither a run's output folder, nor a model, nor a checkpoint"),
        (["classifier", "--prompt=x"], "not a language model: it lacks cls.predictions"),
    ):
        with pytest.raises(UserError, match=f"^[^\\n]*{says}[^\\n]*$"):
            main(arguments)
