"""Labels: which of a head's names the data mean, which are equal, and that all of them are trained."""

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
    """`bert`, whose head has no names, and `head`."""
    for name in ("bert", "head"):
        shutil.copytree(models / "bert", name)
    tiny.write({"head/config.json": {"id2label": dict(enumerate(HEAD))}})


def classifier(labels: list[Any], model: str = "head", **settings: Any) -> Any:
    """A task on 40 rows or more, with these labels in turn."""
    rows = [{"text": f"row {i}", "label": labels[i % len(labels)]} for i in range(max(40, len(labels)))]
    return tiny.task(TextClassification, model=model, dataset=tiny.write({"rows.jsonl": rows}), **settings)


def ids(task: Any, part: int = 0) -> dict[str, int]:
    """The label of each row that is trained on, or evaluated on, by its text."""
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
def test_a_head_keeps_its_names_however_the_data_write_them(
    labels: list[Any], places: list[int], names: list[str], said: str
) -> None:
    """In rows to train on, and in those to evaluate an export on. Tried without, with lower case: its head is
    the wrong way round, and 1.0 of accuracy becomes 0."""
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


def test_a_head_may_know_more_than_the_data_have_and_two_of_its_names_may_differ_in_case_alone() -> None:
    """Tried without the first: its head is replaced; without the second: both are the last."""
    tiny.write({"head/config.json": {"id2label": {0: "neutral", 1: "Positive", 2: "positive", 3: "x"}}})
    task = classifier(["positive", "Neutral", "Positive"], eval_from="last")
    found = ids(task)
    assert [found[f"row {i}"] for i in range(3)] == [2, 0, 1]
    assert len(task.state.data["labels"]) == task.build_model().config.num_labels == 4
    with pytest.raises(UserError, match="y is in the data .*, but not among these labels: neutral, Positive, posi"):
        classifier(["positive", "y"]).build_datasets()


def test_equal_numbers_are_one_label_and_text_stays_as_it_is() -> None:
    """Tried without: four labels, of which two are right half of the time."""
    task = classifier([1, 1.0, True, 0, 0.0, False], "bert")
    assert task.describe("train", task.build_datasets()[0])["labels"] == 2
    assert [*map(label_text, (2, 2.0, -0.0, 2**60, 1.5, "2.0", " 2 "))] == [
        "2",
        "2",
        "0",
        str(2**60),
        "1.5",
        "2.0",
        "2",
    ]
    assert label_text(float("inf")) == "inf"
    assert sorted_labels({"10", "9", "1.5", "-1"}) == ["-1", "1.5", "9", "10"]
    assert sorted_labels({f"LABEL_{i}" for i in range(12)}) == [f"LABEL_{i}" for i in range(12)]


def test_labels_of_the_same_value_have_one_order() -> None:
    """The same on all processes, which each have another order of a set. Tried without: that of this process."""
    names = [f"{'0' * zeros}{number}" for number in (7, 8) for zeros in range(6, -1, -1)]
    assert sorted_labels({*names}) == names


def rows_of(path: Path, number: int) -> Path:
    """A tenth of them with a label of their own."""
    labels = [f"rare {i}" if i % 10 == 0 else "usual" for i in range(number)]
    tiny.write({str(path): [{"text": f"{path.stem} {i}", "label": label} for i, label in enumerate(labels)]})
    return path


def test_no_label_is_in_the_evaluation_rows_alone() -> None:
    """If the run itself chose these at random, the same in each run. Tried without: it refuses its own choice."""

    def built(**settings: Any) -> tuple[dict[str, int], dict[str, int]]:
        task = tiny.task(TextClassification, model="bert", dataset=str(rows_of(Path("a.jsonl"), 200)), **settings)
        return ids(task), ids(task, part=1)

    train, evaluation = built()
    assert len({**train, **evaluation}) == len(train) + len(evaluation) == 200
    assert 10 < len(evaluation) < 20
    assert {*evaluation.values()} < {*train.values()}
    assert len({*train.values()}) == 21
    assert (train, evaluation) == built()
    with pytest.raises(UserError, match="rare 180, rare 190 is in the data .*, the training data's$"):
        built(eval_from="last")


def test_a_head_under_adapters_is_trained_as_it_is_and_exported_as_it_was_trained() -> None:
    """With the pooler, which no file has. Tried without: it is drawn anew for the export; and layers of the head get
    adapters, of which the last one is trained by Muon as if it were within the model."""
    task = classifier(["a", "b"], "bert", lora={"r": 2, "merge": True})
    task.build_datasets()
    model = task.build_model()
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    head = {name for name in trained if "lora" not in name}
    assert {name.rpartition("base_model.model.")[2] for name in head} == {
        "bert.pooler.dense.weight", "bert.pooler.dense.bias", "classifier.weight", "classifier.bias"
    }  # fmt: skip
    assert not any("lora" in name and ("pooler" in name or "classifier" in name) for name in trained)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name in trained:
                parameter.normal_(std=0.1)
    task.export(model, model.state_dict(), Path("exported"))
    exported = AutoModelForSequenceClassification.from_pretrained("exported")
    tokens = torch.tensor([[5, 6, 7, 8]])
    with torch.no_grad():
        found, expected = exported(tokens).logits, model.eval()(tokens).logits
    assert torch.allclose(found, expected, atol=1e-5 * expected.abs().max().item())


@pytest.mark.parametrize(("kind", "fields"), [("t5", tiny.T5), ("bart", tiny.BART)])
def test_each_weight_is_in_one_module(kind: str, fields: dict[str, Any]) -> None:
    """As FSDP has to gather it for one (accelerate pull request 4171). T5's curve: test_parity.py. Tried without: three
    embeddings share theirs."""
    task = classifier(["a", "b"], str(tiny.saved(kind, Path(kind), **fields)))
    task.build_datasets()
    model = task.build_model()
    owners = Counter(parameter for module in model.modules() for parameter in module.parameters(recurse=False))
    assert {*owners.values()} == {1}
    task.export(model, model.state_dict(), Path("exported"))
    exported = classifier(["a", "b"], str(Path("exported")))
    exported.state.data["labels"] = ["a", "b"]
    assert all(value.equal(model.state_dict()[name]) for name, value in exported.build_model().state_dict().items())
