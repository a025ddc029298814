"""python -m src.tools.generate: what transformers generates of the export, from wherever the model comes."""

import io
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer

from src.config.errors import UserError
from src.tools.generate import main
from tests.launching import Launch, Run
from tests.text import tiny

pytestmark = [
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled"),  # in this process, to read
    pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning"),  # peft uses it
]
PROMPT = "Q: the"
ARGUMENTS = ("--task.name=causal_lm", "--max_steps=6", "--global_batch_size=4", "--optim.lr=0.01")
SMALL = "{model_type: llama, hidden_size: 32, intermediate_size: 64, num_hidden_layers: 2, num_attention_heads: 4}"
TEMPLATE = (
    "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}{% if add_generation_prompt %}[a]{% endif %}"
)


@pytest.fixture(scope="module")
def runs(launch: Launch, models: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Run]:
    data = f"--task.dataset={tiny.questions(tmp_path_factory.mktemp('data') / 'questions.jsonl')}"
    adapters = ("--task.lora.r=4", "--task.lora.merge=true", f"--task.model={models}/llama")
    bytes_ = (f"--task.architecture={SMALL}", "--task.sequence_length=96")
    return {
        "adapters": launch("cpu", *ARGUMENTS, data, *adapters, "--task.sequence_length=64").succeeded(),
        "bytes": launch("fsdp", *ARGUMENTS, data, *bytes_, processes=2).succeeded(),
    }


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


@pytest.mark.parametrize("part", ["", "checkpoints/step_00000006", "model/merged"])
@pytest.mark.parametrize("kind", ["adapters", "bytes"])
def test_greedy_continuations_are_those_of_transformers(
    runs: dict[str, Run], models: Path, streamed: list[list[int]], kind: str, part: str
) -> None:
    """Token by token. Tried without loading a checkpoint's weights or adapters."""
    folder = runs[kind].folder
    source, exported = folder / part, folder / "model"
    if not source.exists():
        source = exported  # nothing to merge
    tokenizer: Any = AutoTokenizer.from_pretrained(exported)
    base: Any = AutoModelForCausalLM.from_pretrained(models / "llama" if kind == "adapters" else exported)
    model = PeftModel.from_pretrained(base, exported) if kind == "adapters" else base
    tokens = tokenizer(PROMPT, return_tensors="pt")["input_ids"]
    expected = model.generate(input_ids=tokens, do_sample=False, max_new_tokens=40)[0].tolist()
    main([str(source), f"--prompt={PROMPT}", "--temperature=0", "--max_new_tokens=40"])
    prompt, continuation = streamed
    assert prompt + continuation == expected
    assert len(continuation) > 5


def test_the_continuation_is_printed_and_ends_at_the_models_limit(
    runs: dict[str, Run], streamed: list[list[int]], capsys: pytest.CaptureFixture[str]
) -> None:
    """With the same seed the same. Tried without the limit: more tokens than the model sees."""
    printed = set()
    for _ in range(2):
        main([str(runs["bytes"].folder), "--prompt", "x" * 90, "--max_new_tokens", "1000", "--seed", "3"])
        printed.add(capsys.readouterr().out)
    tokenizer: Any = AutoTokenizer.from_pretrained(runs["bytes"].folder / "model")
    assert printed == {tokenizer.decode(streamed[1], skip_special_tokens=True) + "\n"}
    assert len(streamed[0]) + len(streamed[1]) <= 96


@pytest.mark.parametrize("template", [None, TEMPLATE])
def test_a_chat_has_its_history_and_lines_have_none(
    runs: dict[str, Run],
    tmp_path: Path,
    streamed: list[list[int]],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    template: str | None,
) -> None:
    """Until Ctrl-D. The byte tokenizer's own template, which every model on bytes has, makes no chat."""
    folder = shutil.copytree(runs["bytes"].folder / "model", tmp_path / "model")
    if template:
        (folder / "chat_template.jinja").write_text(template)
    tokenizer: Any = AutoTokenizer.from_pretrained(folder)
    monkeypatch.setattr(sys, "stdin", io.StringIO("the\n\nof\n"))
    with pytest.raises(EOFError):
        main([str(folder), "--temperature=0", "--max_new_tokens=5"])
    first, answer, second, _ = (tokenizer.decode(tokens) for tokens in streamed)
    said = capsys.readouterr().out.splitlines()[0]
    if template:
        assert said.startswith("a chat")
        assert first == "[user]the[a]"
        assert second == f"[user]the[assistant]{answer.removesuffix(tokenizer.eos_token)}[user]of[a]"
    else:
        assert said.startswith("no chat template: each line is continued by itself")
        assert (first, second) == ("<|endoftext|>the", "<|endoftext|>of")


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--prompt="], "--prompt is empty"),
        (["--prompt", "x" * 100], "101 tokens, with all that was said before, and the model sees at most 96"),
        (["--prompt=x", "--temperature=-1"], "has to be a strictly positive float"),
    ],
)
@pytest.mark.usefixtures("streamed")
def test_mistakes_are_one_line(runs: dict[str, Run], arguments: list[str], says: str) -> None:
    with pytest.raises(UserError, match=says) as error:
        main([str(runs["bytes"].folder), *arguments])
    assert "\n" not in str(error.value)


@pytest.mark.usefixtures("streamed")
def test_what_is_no_language_model_is_one_line(models: Path, tmp_path: Path) -> None:
    """Tried without: a classifier talks with a head of random weights."""
    classifier = transformers.AutoModelForSequenceClassification.from_pretrained(models / "bert")
    classifier.save_pretrained(tmp_path / "classifier")
    AutoTokenizer.from_pretrained(models / "bert").save_pretrained(tmp_path / "classifier")
    for folder, says in (
        ("nothing", "neither a run's output folder, nor a model, nor a checkpoint"),
        ("classifier", "not a language model, it lacks cls.predictions"),
    ):
        with pytest.raises(UserError, match=says):
            main([str(tmp_path / folder), "--prompt=x"])
