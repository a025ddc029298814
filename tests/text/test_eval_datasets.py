"""Several evaluation sets: task.eval_datasets."""

import json
from pathlib import Path
from typing import Any

import pytest

from src.config.errors import UserError
from src.tasks.text.text_classification import TextClassification
from src.tools.evaluate import main as evaluate
from src.training.score import score
from tests.launching import Tool
from tests.text import tiny
from tests.text.conftest import Trained
from train import run_settings

LM = ("--task.name=causal_lm", "--task.dataset=rows.jsonl", *tiny.NEW_LLAMA)
MIXED = ("--task.name=streamed_lm", "--task.sources=[{dataset: rows.jsonl}, {dataset: wiki.jsonl}]", *tiny.NEW_LLAMA)
SETS = "--task.eval_datasets={math: rows.jsonl, wiki: rows.jsonl}"


def test_each_set_has_the_metrics_of_an_evaluation_on_it_alone(
    trained: Trained, made: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Sharded over two processes, among which its sequences do not divide."""
    run = trained("lm", "fsdp")
    words = (f"--task.dataset={made}/questions.jsonl", "--output=predictions.parquet")
    alone = json.loads(Tool("evaluate", evaluate, capsys)(run.folder, *words).stdout)
    found = {name: run.summary[f"{name}_all"] for name in ("eval/loss", "eval/accuracy")}
    assert found == pytest.approx({name: alone[name] for name in found}, rel=1e-6)
    assert run.summary["eval/loss"] != pytest.approx(found["eval/loss"], rel=1e-4)


def test_a_set_is_an_evaluation_split_or_all_rows_and_counts_skipped_ones(models: Path) -> None:
    """Never of a training split beside it."""
    rows = [{"text": f"row {i}", "label": "ab"[i % 2]} for i in range(40)]
    tiny.write({"rows.jsonl": rows, "bad.jsonl": [*rows[:7], {}]})
    tiny.write({"both/train.jsonl": [*rows, {}], "both/dev.jsonl": rows[:5]})
    sets = {"all": "rows.jsonl", "dev": "both", "bad": "bad.jsonl"}
    settings: Any = {"model": str(models / "bert"), "dataset": "rows.jsonl", "bad_rows": "skip"}
    task = tiny.task(TextClassification, **settings, eval_datasets=sets)
    train, evaluation = task.build_datasets()
    assert {name: len(found) for name, found in task.eval_sets.items()} == {"all": 40, "dev": 5, "bad": 7}
    assert (len(train), len(evaluation)) == (36, 4)
    for name, says in (("dev", "5 examples, skipped rows 0"), ("bad", "7 examples, skipped rows 1")):
        assert f"evaluation set {name}: {says}" in task.state.remarks


def test_labels_that_a_set_writes_in_another_way_are_a_remark(models: Path) -> None:
    rows = [{"text": f"row {i}", "label": "ab"[i % 2]} for i in range(40)]
    tiny.write({"rows.jsonl": rows, "upper.jsonl": [{"text": "row", "label": "A"}]})
    settings: Any = {"model": str(models / "bert"), "dataset": "rows.jsonl", "eval_datasets": {"upper": "upper.jsonl"}}
    task = tiny.task(TextClassification, **settings)
    task.build_datasets()
    assert task.eval_sets
    assert "evaluation set upper: task.label_column=label: A is read as a" in task.state.remarks


def test_a_label_that_the_model_lacks_is_refused_by_the_sets_name(models: Path) -> None:
    rows = [{"text": f"row {i}", "label": "ab"[i % 2]} for i in range(40)]
    tiny.write({"rows.jsonl": rows, "other.jsonl": [{"text": "row", "label": "c"}]})
    settings: Any = {"model": str(models / "bert"), "dataset": "rows.jsonl", "eval_datasets": {"x": "other.jsonl"}}
    task = tiny.task(TextClassification, **settings)
    task.build_datasets()
    with pytest.raises(UserError, match=r"task\.eval_datasets\.x: task\.label_column=label: c is in the data"):
        _ = task.eval_sets


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ((*LM, SETS, "--checkpoint.metric=eval/loss_maht"), "no such metric, did you mean eval/loss_math?"),
        ((*LM, "--task.eval_datasets={math: none.jsonl}"), "task.eval_datasets.math=none.jsonl: no such file"),
        ((*LM, "--task.train_split="), "should have at least 1 character"),
        ((*LM, "--task.eval_datasets={a b: rows.jsonl}"), "should match pattern"),
        ((*MIXED, SETS), "task.eval_datasets.wiki: eval/loss_wiki is the loss on one of task.sources: rename it"),
    ],
)
def test_mistakes_are_one_line_at_the_start(arguments: tuple[str, ...], says: str) -> None:
    tiny.write({"rows.jsonl": [{"text": "a"}], "wiki.jsonl": [{"text": "a"}]})
    run_settings([*LM, SETS, "--checkpoint.metric=eval/loss_math", "--early_stopping.metric=eval/accuracy_wiki"])
    with pytest.raises(UserError) as refused:
        run_settings([*arguments])
    (line,) = refused.value.args
    assert says in line


@pytest.mark.parametrize(
    "name", ["eval/loss_math", "eval/loss_accuracy", "eval/loss", "eval/my_loss", "eval/perplexity"]
)
def test_a_set_is_ranked_by_its_metric_not_by_its_name(name: str) -> None:
    assert score(1.0, name, None) > score(2.0, name, None)
    assert score(1.0, "eval/accuracy_loss", None) < score(2.0, "eval/accuracy_loss", None)
