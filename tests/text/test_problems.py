"""The problems of a classifier of texts, as transformers names them: one label, several labels, a number; and weights.

Losses are transformers' and torch's, metrics scikit-learn's and scipy's.
"""

import json
import random
import re
import shutil
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy.stats import pearsonr  # type: ignore[import-untyped]
from sklearn.metrics import accuracy_score, f1_score, matthews_corrcoef
from sklearn.utils.class_weight import compute_class_weight
from torch.nn import functional as F
from transformers import pipeline

from src.config.errors import UserError
from src.tasks.base import samples
from src.tasks.text.text_classification import TextClassification
from src.training.evaluation import evaluate_on_one_process, metrics_of
from tests.launching import mistakes
from tests.text import tiny
from train import run_settings

LABELS: dict[str, list[Any]] = {
    "single_label_classification": ["b", "a", "c", "a", "a"],
    "multi_label_classification": [["c", "a"], [], ["a"], ["b", "a"], ["c"]],
    "regression": [0.5, -3, 2, 1e-2, "1.5"],
}
ONE, SEVERAL, NUMBER = LABELS
EXACT = 1e-6
"""Sums of some 60 losses in fp32, in another order: half a bit, 6e-8, for each of the some ten additions on a path."""


@pytest.fixture(autouse=True)
def _model(models: Path) -> None:
    shutil.copytree(models / "bert", "bert")


def rows(labels: list[Any], count: int = 60) -> list[dict[str, Any]]:
    """Return rows of 1 to 9 words, with these labels in turn."""
    draw = random.Random(0)
    texts = (" ".join(draw.choices(tiny.WORDS, k=draw.randint(1, 9))) for _ in range(count))
    return [{"text": f"{i} {text}", "label": labels[i % len(labels)]} for i, text in enumerate(texts)]


def classifier(problem: str, labels: list[Any] | None = None, **settings: Any) -> Any:
    """Return a task of this problem on 60 rows, of which 20 are evaluated on."""
    if "dataset" not in settings:
        settings["dataset"] = tiny.write({"rows.jsonl": rows(labels or LABELS[problem])})
    settings = {"model": "bert", "eval_fraction": 1 / 3, "eval_from": "last"} | settings
    return tiny.task(TextClassification, problem=problem, **settings)


def trained(task: Any) -> Any:
    """Return a model of the task, as if its head had been trained, after its data were read."""
    task.build_datasets()
    torch.manual_seed(0)
    model = task.build_model().eval()
    for parameter in model.parameters():
        if parameter.ndim > 1:  # no biases: logits of both signs, which depend on the text
            torch.nn.init.normal_(parameter, std=0.4)
    return model


def scored(task: Any, model: Any) -> tuple[float, dict[str, float], dict[str, Any], Any]:
    """Return the loss, the metrics, the predictions and the batch of all rows to evaluate on."""
    _, dataset = task.build_datasets()
    loss, outputs = evaluate_on_one_process(task, model, dataset, 7, torch.device("cpu"))
    batch = task.collate(samples(dataset, [*range(len(dataset))]))
    return loss, metrics_of(task, loss, len(dataset), outputs), task.predictions(outputs, dataset), batch


@pytest.mark.parametrize("problem", LABELS)
def test_the_loss_of_each_problem_is_transformers_own(problem: str) -> None:
    """In batches of 7 of 20 rows, as on the whole."""
    task = classifier(problem)
    model = trained(task)
    loss, _, _, batch = scored(task, model)
    with torch.no_grad():
        own = model(**batch["inputs"], labels=batch["labels"])
    assert model.config.problem_type == problem
    assert loss == pytest.approx(own.loss.item(), rel=EXACT)


@pytest.mark.parametrize("problem", LABELS)
def test_the_metrics_of_each_problem_are_the_libraries(problem: str) -> None:
    task = classifier(problem)
    _, metrics, columns, _ = scored(task, trained(task))
    found, expected = columns["prediction"], columns["label"]
    if problem == SEVERAL:
        found, expected = ([[name in labels for name in "abc"] for labels in column] for column in (found, expected))
    averages = {ONE: {"f1": "macro"}, SEVERAL: {"f1_micro": "micro", "f1_macro": "macro"}}.get(problem, {})
    own: dict[str, Any] = {name: f1_score(expected, found, average=how) for name, how in averages.items()}
    if problem == NUMBER:
        assert {*expected} == {*map(float, LABELS[NUMBER])}, "as they are written, not as fp32 has them"
        own["pearson"] = pearsonr(expected, found).statistic
    else:
        own["accuracy"] = accuracy_score(expected, found)
    if problem == ONE:
        own["matthews_correlation"] = matthews_corrcoef(expected, found)
    metrics = {name.removeprefix("eval/"): value for name, value in metrics.items() if "loss" not in name}
    assert metrics == pytest.approx(own | {"examples": 20}, rel=EXACT)
    assert {*metrics} == {"examples", *task.metric_names}
    assert len({*map(str, columns["prediction"])}) > 1


@pytest.mark.parametrize("constant", ["predictions", "references"])
def test_numbers_that_are_all_the_same_have_no_correlation(constant: str) -> None:
    """Of 37 times 0.1, fp32 makes a mean that is not 0.1, and a correlation of what remains."""
    task, both = classifier(NUMBER), {name: torch.rand(37, 1) for name in ("predictions", "references")}
    assert -1 <= task.metrics(both)["pearson"] <= 1
    assert np.isnan(task.metrics(both | {constant: torch.full((37, 1), 0.1)})["pearson"])


@pytest.mark.parametrize("problem", LABELS)
def test_an_export_scores_texts_as_its_task_predicts_them(problem: str) -> None:
    """With the pipeline of transformers, and evaluated again."""
    task = classifier(problem)
    model = trained(task)
    before = scored(task, model)[:3]
    task.export(model, model.state_dict(), Path("exported"))
    exported = classifier(problem)
    loss, _, columns, _ = scored(exported, exported.load_export(Path("exported")).eval())
    assert loss == pytest.approx(before[0], rel=EXACT)
    assert columns["label"] == before[2]["label"]
    classify: Any = pipeline("text-classification", "exported", top_k=None)
    for row, text in enumerate(columns["text"]):
        for score in classify([text])[0]:
            column = "prediction" if problem == NUMBER else f"probability_{score['label']}"
            assert score["score"] == pytest.approx(columns[column][row], rel=1e-5)


def test_labels_of_a_list_are_learnt_and_read_back() -> None:
    task = classifier(SEVERAL)
    train, evaluation = task.build_datasets()
    assert task.state.data == {"labels": ["a", "b", "c"]}
    by_text = {row["text"]: sorted(row["label"]) for row in rows(LABELS[SEVERAL])}
    for dataset in (train, evaluation):
        shown = [task.preview(dataset, i).rpartition("\nlabel: ") for i in range(len(dataset))]
        assert all(str(by_text[text.replace(tiny.END, "").strip()]) == label for text, _, label in shown)
    counts = {name: count for name, count in task.describe("train", train).items() if "label" in name}
    assert counts == {"labels": 3, "label a": 24, "label b": 8, "label c": 16}


def test_lists_in_a_csv_are_json_and_numbers_are_text() -> None:
    lines = ["text,label,score", *('t,"[""b"", ""a""]",.5', "t,[],2"), *['t,"[ ""b"" ]",-1e1'] * 18, ""]
    tiny.write({"a.csv": "\n".join(lines)})
    several = classifier(SEVERAL, dataset="a.csv")
    assert sorted(several.build_datasets()[0]["label"][:])[:3] == [[0, 0], [0, 1], [0, 1]]
    number = classifier(NUMBER, dataset="a.csv", label_column="score")
    assert [*map(sorted, (part["label"][:] for part in number.build_datasets()))] == [
        [[-10]] * 11 + [[0.5], [2]],
        [[-10]] * 7,
    ]


def test_a_head_of_several_labels_keeps_its_names() -> None:
    tiny.write({"bert/config.json": {"id2label": {0: "C", 1: "B", 2: "A"}, "problem_type": SEVERAL}})
    task = classifier(SEVERAL)
    train, _ = task.build_datasets()
    assert task.state.data["labels"] == ["C", "B", "A"]
    assert {tuple(row["label"]) for row in train} == {(1, 0, 1), (0, 0, 0), (0, 0, 1), (0, 1, 1), (1, 0, 0)}
    remark = "task.label_column=label: c is read as C, b is read as B, a is read as A"
    assert remark in task.state.remarks


def test_a_random_split_leaves_no_label_of_a_list_untrained() -> None:
    labels = [["usual", f"rare {i}"] if i % 10 == 0 else [] if i % 3 else ["usual"] for i in range(60)]
    task = classifier(SEVERAL, labels, eval_from="random")
    train, evaluation = task.build_datasets()
    assert len(train) + len(evaluation) == 60
    assert np.sum(train["label"][:], 0).min() == 1
    _, numbers = classifier(NUMBER, [1, 2, 2, *range(3, 60)], eval_from="random").build_datasets()
    assert len(numbers) == 20  # each number need not be there in training
    with pytest.raises(UserError, match="rare 40, rare 50 is in the data .*, the training data's$"):
        classifier(SEVERAL, labels).build_datasets()


TOO_DEEP = "maximum recursion depth exceeded" if sys.version_info < (3, 15) else "Stack overflow"
LIST = 'label is not a list of distinct labels, such as ["a", "b"]: '


@pytest.mark.parametrize(
    ("problem", "label", "says"),
    [
        (SEVERAL, "a", f"{LIST}Expecting value: line 1 column 1 (char 0)"),
        (SEVERAL, '"a"', f"{LIST}a"),
        (SEVERAL, None, f"{LIST}None"),
        (SEVERAL, 1, f"{LIST}1"),
        (SEVERAL, {"a": 1}, f"{LIST}{{'a': 1}}"),
        (SEVERAL, ["a", " a"], f"{LIST}['a', ' a']"),
        (SEVERAL, [["a"]], f"{LIST}is list, not text"),
        (SEVERAL, ["a", None], f"{LIST}is empty"),
        (SEVERAL, "[" * 10**5, LIST + TOO_DEEP),
        (NUMBER, "good", "label could not convert string to float: 'good'"),
        (NUMBER, "", "label could not convert string to float: ''"),
        (NUMBER, None, "label could not convert string to float: 'None'"),
        (NUMBER, True, "label could not convert string to float: 'True'"),
        (NUMBER, [1], "label could not convert string to float: '[1]'"),
        (NUMBER, float("nan"), "label is no finite number in fp32: nan"),
        (NUMBER, "inf", "label is no finite number in fp32: inf"),
        (NUMBER, 1e39, "label is no finite number in fp32: 1e+39"),
        (NUMBER, "1_000", "label could not convert string to float: '1 000'"),
        (ONE, ["a"], "label is list, not text"),
    ],
)
def test_a_label_that_is_none_of_its_problem_is_named_by_line(problem: str, label: Any, says: str) -> None:
    tiny.write({"a.jsonl": [*rows(LABELS[problem]), {"text": "t", "label": label}]})
    with pytest.raises(UserError) as error:
        classifier(problem, dataset="a.jsonl").build_datasets()
    assert f"a.jsonl, line 61: {says}" in str(error.value)
    assert "1 of 61 rows" in str(error.value)
    task = classifier(problem, dataset="a.jsonl", bad_rows="skip")
    assert task.describe("train", task.build_datasets()[0])["skipped_rows"] == 1


def test_a_model_of_another_problem_is_refused() -> None:
    tiny.write({"bert/config.json": {"problem_type": SEVERAL}})
    says = (
        f"^task.model=bert: its config.json says {SEVERAL}, not {NUMBER}: set task.problem, or remove problem_type from"
    )
    with pytest.raises(UserError, match=says):
        classifier(NUMBER).build_datasets()


def test_labels_of_one_name_alone_are_refused() -> None:
    for labels, names in (([[], ["a"]], "a"), ([[]], "none")):
        with pytest.raises(UserError, match=f"the training rows have fewer than two labels: {names}$"):
            classifier(SEVERAL, labels).build_datasets()


def test_settings_of_another_problem_are_refused_at_the_start() -> None:
    tiny.write({"rows.jsonl": rows(LABELS[NUMBER])})
    given = ["--task.name=text_classification", "--task.model=bert", "--task.dataset=rows.jsonl"]
    number = [*given, "--task.problem=regression"]
    (line,) = mistakes(*number, "--checkpoint.metric=eval/f1")
    assert line.startswith("checkpoint.metric=eval/f1: ")
    assert run_settings([*number, "--checkpoint.metric=eval/pearson"]).task.problem == NUMBER
    (line,) = mistakes(*number, "--task.class_weights=balanced")
    assert line == "task.class_weights: a regression has no labels to weigh"
    for wrong in (
        "even",
        "[1, 2]",
        "{a: 0, b: 1}",
        "{a: -1}",
        "{a: x}",
        "{a: .inf}",
        "{a: .nan}",
        "{1.5: true}",
        "{a: 1e39}",
        "{}",
        "2",
    ):
        (line,) = mistakes(*given, f"--task.class_weights={wrong}")
        assert re.fullmatch("task.class_weights=.*: must be balanced, or weights above 0, such as .*", line)


# ------------------------------------------------------------------------------------------------------------ weights
def test_a_label_with_dots_has_a_weight_of_its_own() -> None:
    task = classifier(ONE, ["a.b", "c"], class_weights={"a": {"b": 4}, "c": 1})
    task.build_datasets()
    assert task.state.data["class_weights"] == [4, 1]


GIVEN = {"a": 0.5, "b": 4.0, "c": 2.5}


@pytest.mark.parametrize("weights", ["balanced", GIVEN])
def test_weights_of_single_labels_are_sklearns_in_torchs_loss(weights: Any) -> None:
    task = classifier(ONE, class_weights=weights)
    model = trained(task)
    loss, _, _, batch = scored(task, model)
    trained_on = [row["label"] for row in rows(LABELS[ONE])][:40]
    own = compute_class_weight(weights, classes=np.array([*"abc"]), y=trained_on)
    assert task.state.data["class_weights"] == pytest.approx(own.tolist())
    with torch.no_grad():
        logits = model(**batch["inputs"]).logits
    each = F.cross_entropy(logits, batch["labels"], torch.tensor(own).float(), reduction="none")
    assert loss == pytest.approx(each.mean().item(), rel=EXACT)


@pytest.mark.parametrize("weights", ["balanced", GIVEN])
def test_weights_of_several_labels_are_torchs_pos_weight(weights: Any) -> None:
    task = classifier(SEVERAL, class_weights=weights)
    model = trained(task)
    loss, _, _, batch = scored(task, model)
    counts = np.array([24, 8, 16])  # of 40 rows
    own = torch.tensor((40 - counts) / counts if weights == "balanced" else [*GIVEN.values()])
    assert task.state.data["class_weights"] == pytest.approx(own.tolist())
    with torch.no_grad():
        logits = model(**batch["inputs"]).logits
    expected = F.binary_cross_entropy_with_logits(logits, batch["labels"], pos_weight=own)
    assert loss == pytest.approx(expected.item(), rel=EXACT)


@pytest.mark.parametrize("problem", [ONE, SEVERAL])
def test_other_data_are_evaluated_with_the_weights_of_training(problem: str) -> None:
    """Those of an export are in its config.json."""
    task = classifier(problem, class_weights="balanced")
    model = trained(task)
    (remark,) = [line for line in task.state.remarks if "weights:" in line]
    assert all(
        f"{label} {weight:.3g}" in remark for label, weight in zip("abc", task.state.data["class_weights"], strict=True)
    )
    task.export(model, model.state_dict(), Path("exported"))
    tiny.write({"other.jsonl": rows(LABELS[problem][2:4])})
    other = classifier(problem, dataset="other.jsonl", class_weights="balanced", eval_from="all")
    exported = other.load_export(Path("exported")).eval()
    scored(other, exported)
    assert other.state.data == task.state.data
    assert json.loads(Path("exported/config.json").read_text())["class_weights"] == task.state.data["class_weights"]


@pytest.mark.parametrize("weights", [{"a": 1, "b": 1}, {"a": 1, "b": 1, "c": 1, "d": 1}, "balanced"])
@pytest.mark.parametrize("problem", [ONE, SEVERAL])
def test_each_label_needs_a_weight(problem: str, weights: Any) -> None:
    """A balanced one needs rows."""
    if weights == "balanced":
        tiny.write({"bert/config.json": {"id2label": dict(enumerate("abcd"))}})
    names = r"a [\d.]+, b [\d.]+, c [\d.]+" if weights == "balanced" else ", ".join(f"{name} 1" for name in weights)
    known = "a, b, c, d" if weights == "balanced" else "a, b, c"
    with pytest.raises(UserError, match=f"has {names}; the labels are {known}$"):
        classifier(problem, class_weights=weights).build_datasets()


def test_a_label_that_all_rows_have_cannot_be_balanced() -> None:
    with pytest.raises(UserError, match="each label needs one above 0: has a 0, b 1; the labels are a, b$"):
        classifier(SEVERAL, [["a"], ["a", "b"]], class_weights="balanced").build_datasets()
