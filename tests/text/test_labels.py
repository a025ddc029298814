"""Labels and heads of classifiers: which labels of a head the data mean, and that all are trained and exported."""

import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForSequenceClassification

from src.config.errors import UserError
from src.tasks.base import samples
from src.tasks.text.rows import label_text
from src.tasks.text.text_classification import TextClassification, sorted_labels
from src.tasks.text.tokenizing import byte_tokenizer
from tests.text import tiny

COLUMN = "task.label_column=label:"
HEAD = ["POSITIVE", "NEGATIVE"]
READ = f"{COLUMN} {{}} is read as POSITIVE, {{}} is read as NEGATIVE"
REPLACED = f"{COLUMN} the data's replace the model's, as none is the same: POSITIVE, NEGATIVE"


@pytest.fixture(autouse=True)
def _models(models: Path) -> None:
    """Copy the model `bert`, whose head has no names, and as `head` with HEAD."""
    for name in ("bert", "head"):
        shutil.copytree(models / "bert", name)
    tiny.write({"head/config.json": {"id2label": dict(enumerate(HEAD))}})


def classifier(labels: list[Any], model: str = "head", **settings: Any) -> Any:
    """Return a task on 40 rows or more, with these labels in turn."""
    rows = [{"text": f"row {i}", "label": labels[i % len(labels)]} for i in range(max(40, len(labels)))]
    return tiny.task(TextClassification, model=model, dataset=tiny.write({"rows.jsonl": rows}), **settings)


def ids(task: Any, part: int = 0) -> dict[str, int]:
    """Return the label of each row to train on, or to evaluate on, by its text."""
    dataset = task.build_datasets()[part]
    batch = task.collate(samples(dataset, [*range(len(dataset))]))
    texts = byte_tokenizer().batch_decode(batch["inputs"]["input_ids"], skip_special_tokens=True)
    return dict(zip(texts, batch["labels"].tolist(), strict=True))


@pytest.mark.parametrize(
    ("labels", "places", "names", "said"),
    [
        (["NEGATIVE", "POSITIVE"], [1, 0], HEAD, ""),
        (["negative", "positive"], [1, 0], HEAD, READ.format("positive", "negative")),
        ([" Posi tive", "NEGATIVE"], [0, 1], HEAD, f"{COLUMN} Posi tive is read as POSITIVE"),
        ([1, 0], [1, 0], HEAD, READ.format(0, 1)),
        ([True, False], [1, 0], HEAD, READ.format(0, 1)),
        (["pos", "neg"], [1, 0], ["neg", "pos"], REPLACED),
        ([0, 1, 2], [0, 1, 2], ["0", "1", "2"], REPLACED),
    ],
)
def test_a_head_keeps_its_labels_however_the_data_write_them(
    labels: list[Any], places: list[int], names: list[str], said: str
) -> None:
    """In training, and when an export is evaluated."""
    task = classifier(labels, eval_from="last")
    found = ids(task)
    assert task.state.remarks == [said] * bool(said)
    assert found == {f"row {i}": places[i % len(places)] for i in range(36)}
    assert task.state.data == {"labels": names}
    model = task.build_model()
    task.export(model, model.state_dict(), Path("exported"))
    assert AutoConfig.from_pretrained("exported").id2label == dict(enumerate(names))
    exported = classifier(labels, eval_from="last")
    exported.load_export(Path("exported"))
    assert ids(exported) == found


def test_a_head_may_have_more_labels_than_the_data_even_in_another_case() -> None:
    tiny.write({"head/config.json": {"id2label": {0: "neutral", 1: "Positive", 2: "positive", 3: "x"}}})
    task = classifier(["positive", "Neutral", "Positive"], eval_from="last")
    found = ids(task)
    assert [found[f"row {i}"] for i in range(3)] == [2, 0, 1]
    assert len(task.state.data["labels"]) == task.build_model().config.num_labels == 4
    with pytest.raises(UserError, match="y is in the data .*, but not among these labels: neutral, Positive, posi"):
        classifier(["positive", "y"]).build_datasets()


def test_equal_numbers_are_one_label_and_text_stays_as_it_is() -> None:
    task = classifier([1, 1.0, True, 0, 0.0, False], "bert")
    assert task.describe("train", task.build_datasets()[0])["labels"] == 2
    assert [*map(label_text, (2.0, -0.0, 2**60, 1.5, "2.0", " 2 "))] == ["2", "0", str(2**60), "1.5", "2.0", "2"]


def test_labels_have_one_order_on_all_processes() -> None:
    """Each process has its own order of a set. Numbers are sorted by value."""
    assert sorted_labels({"10", "9", "1.5", "-1"}) == ["-1", "1.5", "9", "10"]
    for names in ([f"LABEL_{i}" for i in range(12)], [f"{'0' * n}{i}" for i in (7, 8) for n in range(6, -1, -1)]):
        assert sorted_labels({*names}) == names


def test_the_runs_own_split_leaves_no_label_in_the_evaluation_rows_alone() -> None:
    """The same in each run. A split of the user's that does is refused."""
    labels = [f"rare {i}" if i % 10 == 0 else "usual" for i in range(200)]
    train, evaluation = (ids(classifier(labels, "bert"), part) for part in (0, 1))
    assert len({**train, **evaluation}) == len(train) + len(evaluation) == 200
    assert 10 < len(evaluation) < 20
    assert {*evaluation.values()} < {*train.values()}
    assert len({*train.values()}) == 21
    assert train == ids(classifier(labels, "bert"))
    with pytest.raises(UserError, match="rare 180, rare 190 is in the data .*, the training data's$"):
        ids(classifier(labels, "bert", eval_from="last"))


def test_a_head_beside_adapters_is_trained_and_exported_without_adapters() -> None:
    """With the pooler, which no file has, and which would be drawn anew for the export."""
    task = classifier(["a", "b"], "bert", lora={"r": 2, "merge": True})
    task.build_datasets()
    model = task.build_model()
    trained = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    head = {name.rpartition("base_model.model.")[2] for name in trained if "lora" not in name}
    layers = ("bert.pooler.dense", "classifier")
    assert head == {f"{layer}.{kind}" for layer in layers for kind in ("weight", "bias")}
    assert not any("lora" in name and ("pooler" in name or "classifier" in name) for name in trained)
    with torch.no_grad():
        for parameter in trained.values():
            parameter.normal_(std=0.1)
    task.export(model, model.state_dict(), Path("exported"))
    exported = AutoModelForSequenceClassification.from_pretrained("exported")
    tokens = torch.tensor([[5, 6, 7, 8]])
    with torch.no_grad():
        found, expected = exported(tokens).logits, model.eval()(tokens).logits
    assert torch.allclose(found, expected, atol=1e-5 * expected.abs().max().item())


@pytest.mark.parametrize(("kind", "fields"), [("t5", tiny.T5), ("bart", tiny.BART)])
def test_tied_embeddings_are_one_module_so_that_fsdp_gathers_them(kind: str, fields: dict[str, Any]) -> None:
    """Accelerate pull request 4171. T5's curve: test_parity.py."""
    task = classifier(["a", "b"], str(tiny.saved(kind, Path(kind), **fields)))
    task.build_datasets()
    model = task.build_model()
    owners = Counter(parameter for module in model.modules() for parameter in module.parameters(recurse=False))
    assert {*owners.values()} == {1}
    task.export(model, model.state_dict(), Path("exported"))
    exported = classifier(["a", "b"], "exported")
    exported.state.data["labels"] = ["a", "b"]
    assert all(value.equal(model.state_dict()[name]) for name, value in exported.build_model().state_dict().items())
