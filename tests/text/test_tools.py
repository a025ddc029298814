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
from accelerate.utils import set_seed
from transformers import AutoModelForCausalLM, AutoTokenizer

from src.config.terminal import visible
from src.tasks.text.text_classification import TextClassification
from src.tasks.text.text_task import TextTask
from src.tools.checkpoints import main as checkpoints
from src.tools.evaluate import main as evaluate
from src.tools.generate import main as generate
from tests.launching import Tool
from tests.text import tiny
from tests.text.conftest import Trained

GREEDY = ("--temperature=0", "--max_new_tokens=40")
SEED = 3
TEMPLATE = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}{{ '[a]' if add_generation_prompt }}"


def continued(folder: Path, text: str, tokens: int = 40, **options: Any) -> str:
    """Return the continuation by transformers itself: greedy, unless the options say otherwise."""
    tokenizer: Any = AutoTokenizer.from_pretrained(folder)
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    given = tokenizer(text, return_tensors="pt", add_special_tokens="[" not in text)["input_ids"]
    set_seed(SEED)
    found = model.generate(given, **{"do_sample": False, "max_new_tokens": tokens} | options)[0, given.shape[1] :]
    return tokenizer.decode(found, skip_special_tokens=True)


def printed(text: str) -> str:
    return "\n".join(map(visible, text.split("\n"))) + "\n"


@pytest.mark.parametrize("kind", ["lm", "lm with adapters"])
def test_text_is_generated_as_transformers_does(
    trained: Trained, capsys: pytest.CaptureFixture[str], kind: str
) -> None:
    """From the run, a checkpoint and the merged model; up to the model's limit of 256 tokens."""
    run = trained(kind, "fsdp")
    expected = printed(continued(run.folder / "model", "Q: the"))
    assert len(expected) > 6
    for source in (run.folder, max(run.folder.glob("checkpoints/*")), run.folder / "model/merged"):
        if source.exists():  # or there is nothing to merge
            capsys.readouterr()
            generate([str(source), "--prompt=Q: the", *GREEDY])
            assert capsys.readouterr().out == expected
    generate([str(run.folder), f"--prompt={'x' * 250}", "--max_new_tokens=1000", f"--seed={SEED}"])
    limited = continued(run.folder / "model", "x" * 250, 256 - 251, do_sample=True, temperature=0.8)
    assert capsys.readouterr().out == printed(limited)


@pytest.mark.parametrize("template", ["", TEMPLATE], ids=["lines", "chat"])
def test_a_chat_has_its_history_and_lines_have_none(
    trained: Trained, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, template: str
) -> None:
    """Until Ctrl-D. The byte tokenizer's own template, which every model on bytes has, makes no chat."""
    model = Path(shutil.copytree(trained("lm", "fsdp").folder / "model", "model"))
    if template:
        (model / "chat_template.jinja").write_text(template)
    monkeypatch.setattr(sys, "stdin", io.StringIO("the\n\nof\n"))
    with pytest.raises(EOFError):
        generate([str(model), *GREEDY])
    answer = continued(model, "[user]the[a]" if template else "the")
    second = continued(model, f"[user]the[assistant]{answer}[user]of[a]" if template else "of")
    says = "chat" if template else "no chat template: each line is completed by itself"
    assert capsys.readouterr().out == f"{says} (Ctrl-D to exit)\n> {printed(answer)}> > {printed(second)}> "


CODE = "open('it_ran', 'w')\nclass Mine: pass\n"
AUTO_MAP = dict.fromkeys(("AutoConfig", "AutoModel", "AutoModelForCausalLM"), "mine.Mine")
OWN_TOKENIZER = {"auto_map": {"AutoTokenizer": [None, "mine.Mine"]}, "tokenizer_class": "MineTokenizer"}
REFUSED: dict[str, tuple[dict[str, Any], tuple[str, ...], str]] = {
    "no prompt": ({}, ("theirs", "--prompt="), "--prompt is empty"),
    "a long prompt": ({}, ("theirs", f"--prompt={'x' * 300}"), "have 301 tokens, but the model's limit is 256"),
    "no model": ({}, ("nothing", "--prompt=x"), "neither a run's output folder, nor a model, nor a checkpoint"),
    # nobody is asked whether to run it: the answer would come from the prompts
    "code of a tokenizer": ({"tokenizer_config.json": OWN_TOKENIZER}, ("theirs",), ""),
    "code of a model": ({"config.json": {"auto_map": AUTO_MAP, "model_type": "mine"}}, ("theirs",), ""),
    "code of the base of adapters": ({"config.json": {"auto_map": AUTO_MAP, "model_type": "mine"}}, ("adapters",), ""),
    "damaged settings": ({"generation_config.json": {"eos_token_id": {"a": 1}}}, ("theirs", "--prompt=a"), ""),
    "a template with a long loop": (
        {"chat_template.jinja": "{% for i in range(10**9) %}{% endfor %}"}, ("theirs", "--prompt=a"), "",
    ),
    "a template that fails": ({"chat_template.jinja": "{{ raise_exception('no') }}"}, ("theirs", "--prompt=a"), "no"),
}  # fmt: skip


@pytest.mark.parametrize(("changes", "arguments", "says"), REFUSED.values(), ids=REFUSED)
def test_generate_refuses_in_one_line_and_runs_no_code_of_a_model(
    models: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch,
    changes: dict[str, Any], arguments: tuple[str, ...], says: str,
) -> None:  # fmt: skip
    shutil.copytree(models / "llama", "theirs")
    tiny.write({"theirs/mine.py": CODE, **{f"theirs/{name}": content for name, content in changes.items()}})
    tiny.write({"adapters/adapter_config.json": '{"peft_type": "LORA", "base_model_name_or_path": "theirs"}'})
    monkeypatch.setattr(sys, "stdin", io.StringIO("y\ny\n"))
    refused = Tool("generate", generate, capsys)(*arguments)
    assert refused.exit_code == 2
    (line,) = refused.stderr.splitlines()
    assert line.startswith("generate: ")
    assert says in line
    assert not Path("it_ran").exists()


@pytest.mark.parametrize(
    ("task", "names"),
    [
        ("lm with adapters", {"perplexity"}),
        ("lm with PiSSA", {"perplexity"}),
        ("classifier with adapters", {"f1", "matthews_correlation"}),
    ],
)
def test_metrics_of_an_export_and_a_checkpoint_are_the_trainings_own(
    trained: Trained, capsys: pytest.CaptureFixture[str], task: str, names: set[str]
) -> None:
    run = trained(task, "fsdp")
    for part in ("model", "checkpoints/step_00000012"):
        output = f"{Path(part).name}.parquet"
        metrics = json.loads(Tool("evaluate", evaluate, capsys)(run.folder / part, f"--output={output}").stdout)
        assert metrics == pytest.approx({name: run.summary[name] for name in metrics}, rel=1e-6)
        assert {*metrics} == {f"eval/{name}" for name in {"loss", "accuracy", "examples"} | names}
        rows = pq.read_table(output).to_pylist()
        assert len(rows) == metrics["eval/examples"]
        if task.startswith("lm"):
            nats, targets = (sum(row[name] for row in rows) for name in ("nats", "targets"))
            assert nats / targets == pytest.approx(metrics["eval/loss"])


def test_all_rows_of_other_data_count_and_keep_the_models_labels(
    trained: Trained, made: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    header, *lines = (made / "reviews/dev.tsv").read_text().splitlines()
    rising = [line for line in lines if line.endswith("rising")]
    tiny.write({"other.tsv": "\n".join([header, *rising, ""]), "unknown.tsv": f"{header}\nof the\trising\nof\tflat\n"})
    folder, run = trained("classifier with adapters", "fsdp").folder, Tool("evaluate", evaluate, capsys)
    done = run(folder, "--output=predictions.parquet", f"--task.dataset={Path.cwd()}/other.tsv")
    rows = sorted(pq.read_table("predictions.parquet").to_pylist(), key=lambda row: row["row"])
    assert [f"{row['text']}\t{row['label']}" for row in rows] == rising
    for row in rows:
        assert row["prediction"] == max(("falling", "rising"), key=lambda label: row[f"probability_{label}"])
    right = sum(row["prediction"] == "rising" for row in rows)
    assert json.loads(done.stdout)["eval/accuracy"] == pytest.approx(right / len(rising))
    for setting in ("problem=regression", "class_weights=balanced"):
        assert "only settings of the task that choose the data" in run(folder, f"--task.{setting}").stderr
    refused = run(folder, f"--task.dataset={Path.cwd()}/unknown.tsv").stderr
    assert "flat is in the data (flat, rising), but not among these labels: falling, rising" in refused


@pytest.mark.parametrize(("kind", "yaml"), [("lm with adapters", "fsdp"), ("classifier", "alone")])
def test_a_checkpoint_is_exported_as_its_run_exports(
    trained: Trained, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, yaml: str
) -> None:
    """The same files, the same weights bit for bit; a classifier's labels are known without data."""
    run = trained(kind, yaml)
    monkeypatch.delattr(TextTask, "open_rows")
    copy = shutil.copytree(run.folder / "checkpoints/step_00000012", tmp_path / "elsewhere")
    assert not checkpoints(["export", str(copy), f"--output={tmp_path}/model"])
    there = {path.name for path in (run.folder / "model").iterdir()}
    assert {path.name for path in (tmp_path / "model").iterdir()} == there
    (file,) = (name for name in there if name.endswith(".safetensors"))
    assert (tmp_path / "model" / file).read_bytes() == (run.folder / "model" / file).read_bytes()


def test_an_export_is_evaluated_without_the_model_that_it_started_from(models: Path) -> None:
    """With a tokenizer and config of its own."""
    shutil.copytree(models / "bert", "start")
    tiny.write({"a.csv": "text,label\na,x\nb,y\n" + "c,x\n" * 8})
    settings: dict[str, Any] = {"model": "start", "dataset": "a.csv"}
    task = tiny.task(TextClassification, **settings)
    task.build_datasets()
    model = task.build_model()
    task.export(model, model.state_dict(), Path("exported"))
    shutil.rmtree("start")
    exported = tiny.task(TextClassification, **settings)
    exported.load_export(Path("exported"))
    _, evaluation = exported.build_datasets()
    assert (len(evaluation), exported.state.data) == (1, {"labels": ["x", "y"], "class_weights": None})
