"""src.tools with transformers: what is generated, evaluated and exported, from wherever the model comes."""

import io
import json
import shutil
import sys
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from src.config.errors import UserError
from src.config.terminal import visible
from src.tasks.text.text_classification import TextClassification
from src.tasks.text.text_task import TextTask
from src.tools.checkpoints import main as checkpoints
from src.tools.evaluate import main as evaluate
from src.tools.generate import Printer
from src.tools.generate import main as generate
from tests.text import tiny
from tests.text.conftest import Trained

TEMPLATE = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}{{ '[a]' if add_generation_prompt }}"
PREDICTIONS = "predictions.parquet"


@pytest.fixture
def folder(trained: Trained) -> str:
    """Of a run whose model sees 256 tokens."""
    return str(trained("lm", "fsdp").folder)


@pytest.fixture
def streamed(monkeypatch: pytest.MonkeyPatch) -> list[list[int]]:
    """The tokens that pass through the streamer: in turns those of a prompt and those of what follows it."""
    seen: list[list[int]] = []

    class Streamer(Printer):
        def put(self, value: torch.Tensor) -> None:
            if self.next_tokens_are_prompt:
                seen.extend((value.flatten().tolist(), []))
            else:
                seen[-1].extend(value.tolist())
            super().put(value)

    monkeypatch.setattr("src.tools.generate.Printer", Streamer)
    return seen


@pytest.mark.parametrize("kind", ["lm", "lm with adapters"])
def test_greedy_continuations_are_those_of_transformers(trained: Trained, streamed: list[list[int]], kind: str) -> None:
    """Of the run, a checkpoint and the merged model. Tried without loading a checkpoint's weights or adapters."""
    run = trained(kind, "fsdp")
    exported = run.folder / "model"
    tokenizer: Any = AutoTokenizer.from_pretrained(exported)
    model: Any = AutoModelForCausalLM.from_pretrained(exported, dtype=torch.float32)
    prompt, tokens = "Q: the", tokenizer("Q: the", return_tensors="pt")["input_ids"]
    expected = model.generate(input_ids=tokens, do_sample=False, max_new_tokens=40)[0].tolist()
    for source in (run.folder, max(run.folder.glob("checkpoints/*")), exported / "merged"):
        if source.exists():  # or there is nothing to merge
            streamed.clear()
            generate([str(source), f"--prompt={prompt}", "--temperature=0", "--max_new_tokens=40"])
            assert [*streamed[0], *streamed[1]] == expected
            assert len(streamed[1]) > 5


def test_the_continuation_is_printed_and_ends_at_the_models_limit(
    folder: str, streamed: list[list[int]], capsys: pytest.CaptureFixture[str]
) -> None:
    """With the same seed the same. Tried without the limit: more tokens than the model sees."""
    printed = set()
    for _ in range(2):
        generate([folder, "--prompt", "x" * 250, "--max_new_tokens", "1000", "--seed", "3"])
        printed.add(capsys.readouterr().out)
    tokenizer: Any = AutoTokenizer.from_pretrained(f"{folder}/model")
    said = tokenizer.decode(streamed[1], skip_special_tokens=True)
    assert printed == {"\n".join(map(visible, said.split("\n"))) + "\n"}
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
        generate([str(model), "--temperature=0", "--max_new_tokens=5"])
    first, answer, second, _ = (tokenizer.decode(tokens) for tokens in streamed)
    assert capsys.readouterr().out.startswith(says)
    assert first == begins
    assert second == goes_on.replace("ANSWER", answer.removesuffix(tokenizer.eos_token))


def test_mistakes_of_generate_are_one_line(folder: str) -> None:
    for arguments, says in (
        ([folder, "--prompt="], "--prompt is empty"),
        ([folder, "--prompt", "x" * 300], "the chat so far have 301 tokens, but the model's limit is 256"),
        (["nothing", "--prompt=x"], "neither a run's output folder, nor a model, nor a checkpoint"),
    ):
        with pytest.raises(UserError, match=f"^[^\\n]*{says}[^\\n]*$"):
            generate(arguments)


def evaluated(capsys: pytest.CaptureFixture[str], *arguments: str | Path) -> dict[str, float]:
    capsys.readouterr()
    evaluate([*map(str, arguments)])
    return json.loads(capsys.readouterr().out)


@pytest.mark.parametrize(("task", "names"), [("lm", {"perplexity"}), ("classifier", {"f1", "matthews_correlation"})])
def test_the_metrics_are_the_trainings_own(
    trained: Trained, capsys: pytest.CaptureFixture[str], tmp_path: Path, task: str, names: set[str]
) -> None:
    """Of adapters, exported or in a checkpoint. Tried without loading them from the checkpoint: another loss."""
    run = trained(f"{task} with adapters", "fsdp")
    for part in ("model", "checkpoints/step_00000012"):
        output = tmp_path / part.replace("/", "-") / PREDICTIONS
        output.parent.mkdir()
        metrics = evaluated(capsys, run.folder / part, f"--output={output}")
        assert metrics == pytest.approx({name: run.summary[name] for name in metrics}, rel=1e-6)
        assert {f"eval/{name}" for name in {"loss", "accuracy", "examples"} | names} == set(metrics)
        rows = pq.read_table(output).to_pylist()
        assert len(rows) == metrics["eval/examples"]
        if task == "lm":
            nats, targets = (sum(row[name] for row in rows) for name in ("nats", "targets"))
            assert nats / targets == pytest.approx(metrics["eval/loss"])


def test_all_other_rows_count(trained: Trained, made: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """Its labels need not be all, and keep their numbers. Tried without: a tenth of the rows."""
    other, output = tmp_path / "other.tsv", tmp_path / PREDICTIONS
    lines = (made / "reviews" / "dev.tsv").read_text().splitlines()
    rising = [line for line in lines if line.endswith("rising")]
    other.write_text("\n".join([*lines[:1], *rising, ""]))
    arguments = (trained("classifier with adapters", "fsdp").folder, f"--output={output}", f"--task.dataset={other}")
    metrics = evaluated(capsys, *arguments)
    rows = sorted(pq.read_table(output).to_pylist(), key=lambda row: row["row"])
    assert [f"{row['text']}\t{row['label']}" for row in rows] == rising
    for row in rows:
        assert row["prediction"] == max(("falling", "rising"), key=lambda label: row[f"probability_{label}"])
    right = [row["prediction"] == "rising" for row in rows]
    assert metrics["eval/accuracy"] == pytest.approx(sum(right) / len(rising))
    output.unlink()
    other.write_text("text\tlabel\nof the and\trising\nof\tflat\n")
    with pytest.raises(UserError, match="flat is in the data .*, but not among these labels: falling, rising"):
        evaluated(capsys, *arguments)


@pytest.mark.parametrize(("kind", "yaml"), [("lm with adapters", "fsdp"), ("classifier", "alone")])
def test_export_again(trained: Trained, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, yaml: str) -> None:
    """The same files as the run's, the same weights to the last bit; a classifier's labels are known without data."""
    run = trained(kind, yaml)
    monkeypatch.delattr(TextTask, "open_rows")
    copy = shutil.copytree(run.folder / "checkpoints" / "step_00000012", tmp_path / "elsewhere")
    assert not checkpoints(["export", str(copy), f"--output={tmp_path}/model"])
    there = {path.name for path in (run.folder / "model").iterdir()}
    assert {path.name for path in (tmp_path / "model").iterdir()} == there
    (file,) = (name for name in there if name.endswith(".safetensors"))
    assert (tmp_path / "model" / file).read_bytes() == (run.folder / "model" / file).read_bytes()


def test_an_export_is_evaluated_without_the_model_that_it_started_from(models: Path) -> None:
    """With the tokenizer and config of its own. Tried without: `start` cannot be loaded."""
    shutil.copytree(models / "bert", "start")
    tiny.write({"a.csv": "text,label\na,x\nb,y\n" + "c,x\n" * 8})
    settings: dict[str, Any] = {"model": "start", "dataset": "a.csv"}
    trained = tiny.task(TextClassification, **settings)
    trained.build_datasets()
    model = trained.build_model()
    trained.export(model, model.state_dict(), Path("exported"))
    shutil.rmtree("start")
    exported = tiny.task(TextClassification, **settings)
    exported.load_export(Path("exported"))
    _, evaluation = exported.build_datasets()
    assert (len(evaluation), exported.state.data) == (1, {"labels": ["x", "y"]})
