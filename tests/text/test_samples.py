"""What a language model writes at each evaluation is what transformers would generate, under every strategy."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from src.config.errors import UserError
from src.tasks.text import samples
from tests.launching import Launch, Run, needs, slow
from tests.text import tiny
from tests.text.conftest import Trained
from tests.text.tasks import TEXT, over

auto: Any = AutoModelForCausalLM


def tables(run: Run) -> list[Any]:
    """Return the samples of each evaluation, by its step."""
    return [(record["step"], record["eval/samples"]) for record in run.records if "eval/loss" in record]


def generated(model: Any, tokenizer: Any, prompt: str, most: int = samples.MAX_NEW) -> str:
    """Return transformers' own greedy continuation of a text that has all its special tokens."""
    tokens = tokenizer(prompt, add_special_tokens=False, return_tensors="pt")
    with torch.no_grad():
        found = model.generate(**tokens, max_new_tokens=most, do_sample=False)[0]
    return tokenizer.decode(found)[len(prompt) :]


def test_samples_are_transformers_own_of_the_export(trained: Trained, made: Path) -> None:
    """Of the first two evaluation rows, in the log, the terminal and the report."""
    run = trained("lm")
    model, tokenizer = (kind.from_pretrained(run.folder / "model") for kind in (auto, AutoTokenizer))
    rows = [json.loads(line) for line in (made / "questions.jsonl").read_text().splitlines()][-12:-10]
    expected = [(text := tiny.END + row["prompt"], generated(model, tokenizer, text)) for row in rows]
    (step, table) = tables(run)[-1]
    assert step == run.summary["step"]
    assert table == [{"prompt": prompt, "continuation": text} for prompt, text in expected]
    report = (run.folder / "report.html").read_text()
    for prompt, text in expected:
        assert f"  {prompt}⟦{text}⟧".replace("\n", "\\n") in run.stdout.splitlines()
        assert text.strip() in report
    assert "<h2>eval/samples</h2>" in report


@pytest.mark.parametrize(
    ("yaml", "how"), [slow("ddp", {}), ("fsdp", {}), ("fsdp_cp", over(2, 2)), slow("fsdp_cp", over(1, 3))]
)
def test_samples_are_the_same_under_every_strategy(trained: Trained, yaml: str, how: dict[str, Any]) -> None:
    assert tables(trained("lm", yaml, **how)) == tables(trained("lm"))


@pytest.fixture(scope="module")
def llama(models: Path) -> Any:
    return models / "spread"


@pytest.mark.parametrize("kind", ["raw text", "chat"])
def test_texts_in_the_settings_are_continued(llama: Path, kind: str) -> None:
    """Each begins as a document does, and ends with the token that ends a text, or a turn; the rest is as it was."""
    texts, file = ["the of", f"{tiny.END}and", "x" * 40], Path("rows.jsonl")
    tiny.chats(file) if kind == "chat" else tiny.write({file.name: [{"text": "to be or not to be"}] * 9})
    chat = {"chat_template": "chatml", "new_tokens": ["<|im_start|>", "<|im_end|>"]} if kind == "chat" else {}
    task = tiny.task(model=str(llama), dataset=str(file), samples=texts, **chat)
    _, dataset = task.build_datasets()
    torch.manual_seed(0)
    model = task.build_model().eval()
    before = torch.get_rng_state()
    with torch.no_grad():
        rows = task.generate(model, dataset)
    assert torch.equal(torch.get_rng_state(), before)
    prompts = [f"{tiny.END}the of", f"{tiny.END}and", tiny.END + 40 * "x"]
    expected = [generated(model.lm, task._tokenizer, prompt, min(32, 64 - len(prompt) + 12)) for prompt in prompts]
    assert [(row["prompt"], row["continuation"]) for row in rows] == [*zip(prompts, expected, strict=True)]


@pytest.mark.parametrize("eos", ["<|im_end|>", tiny.END])
def test_a_continuation_ends_with_the_turn(models: Path, monkeypatch: pytest.MonkeyPatch, eos: str) -> None:
    """Whether or not that is the token that ends a text."""
    tiny.chats(Path("chats.jsonl"))
    task = tiny.task(model=str(models / "tied"), dataset="chats.jsonl", chat_template="chatml",
                     new_tokens=["<|im_start|>", "<|im_end|>"])  # fmt: skip
    _, dataset = task.build_datasets()
    model = task.build_model().eval()
    end = task._tokenizer.convert_tokens_to_ids("<|im_end|>")
    task._tokenizer.eos_token = eos

    def write(input_ids: torch.Tensor, index: torch.Tensor, **_: Any) -> torch.Tensor:
        """Likeliest is 3 after the prompt, then the end of the turn."""
        assert input_ids.shape == (1, int(index) + 1), "no wider than it has to be"
        is_second = input_ids.flatten()[index] == 3
        return torch.nn.functional.one_hot(torch.where(is_second, end, 3), 300)

    monkeypatch.setattr(model, "forward", write)
    three = str(task._tokenizer.decode([3]))
    rows = task.generate(model, dataset)
    assert [row["continuation"] for row in rows] == [f"{three}<|im_end|>"] * 2
    assert all(row["prompt"].endswith("<|im_end|>\n<|im_start|>assistant\n") for row in rows)


@pytest.mark.parametrize("arguments", [{"samples": []}, {"train_on_prompts": True}, {"text_column": "prompt"}])
def test_without_prompts_there_are_no_samples(llama: Path, made: Path, arguments: dict[str, Any]) -> None:
    task = tiny.task(model=str(llama), dataset=str(made / "questions.jsonl"), **arguments)
    _, dataset = task.build_datasets()
    assert task.generate(None, dataset) == []


@pytest.mark.parametrize("text", ["", "x" * 63])
def test_a_text_that_cannot_be_continued_is_refused_before_training(llama: Path, text: str) -> None:
    task = tiny.task(model=str(llama), samples=["fits", text])
    with pytest.raises(UserError) as error:
        task.build_model()
    assert str(error.value) == f"task.samples: {text[:40]!r} must have 1 to 63 tokens (task.sequence_length)"


@needs("src/tracking/wandb.py")
def test_wandb_has_the_samples_as_a_table(launch: Launch, shared: Path) -> None:
    run = TEXT["lm"].ready(shared).run(launch, "cpu", "--max_steps=1", wandb="offline").succeeded()
    (file,) = run.folder.glob("wandb/offline-run-*/files/media/table/eval/samples_*.json")
    shown = json.loads(file.read_text())
    assert shown["columns"] == ["prompt", "continuation"]
    assert shown["data"] == [[*row.values()] for row in run.records[-1]["eval/samples"]]
