"""The tables of an evaluation: which examples, labels and numbers a person gets to see."""

import io
from base64 import b64decode
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from src.tasks import tables
from src.tasks.mnist import Mnist, bundled_digits
from src.tasks.tables import label_tables
from tests.launching import Launch, Whole

SHORT = ("--max_steps=12", "--log_every=4", "--eval_every=6", "--task.dropout=0", "--task.rotation=0",
         "--optim.lr=1e-4")  # fmt: skip  # small, as in test_parity.py


def outputs(references: list[int], probabilities: list[list[float]]) -> dict[str, Any]:
    made = torch.tensor(probabilities)
    return {"references": torch.tensor(references), "probabilities": made, "predictions": made.argmax(1)}


def test_mistakes_come_most_confident_first_and_labels_are_counted() -> None:
    """Tried with the confidence in the right label in place of the predicted one: another order. Tried with rows and
    columns of the confusion exchanged."""
    found = outputs([0, 0, 1, 1, 1], [[0.9, 0.1, 0], [0.4, 0.6, 0], [0.8, 0.2, 0], [0.1, 0.9, 0], [0.7, 0, 0.3]])
    assert label_tables(found, ["no", "yes", "maybe"], lambda i: {"text": f"text {i}"}) == {
        "mistakes": [
            {"text": f"text {i}", "label": label, "prediction": other, "confidence": pytest.approx(c), "index": i}
            for i, label, other, c in [(2, "yes", "no", 0.8), (4, "yes", "no", 0.7), (1, "no", "yes", 0.6)]
        ],
        "confusion": [
            {"label": "no", "no": 1, "yes": 1, "maybe": 0},
            {"label": "yes", "no": 2, "yes": 1, "maybe": 0},
            {"label": "maybe", "no": 0, "yes": 0, "maybe": 0},
        ],
        "classes": [
            {"label": "no", "examples": 2, "accuracy": 0.5},
            {"label": "yes", "examples": 3, "accuracy": pytest.approx(1 / 3)},
            {"label": "maybe", "examples": 0, "accuracy": None},
        ],
    }
    assert "mistakes" not in label_tables(outputs([0], [[0.9, 0.1]]), ["no", "yes"], lambda i: {})


def test_tables_stay_small_whatever_the_number_of_labels_and_mistakes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two of 1,000 labels are confused: they are shown. Tried without MOST_LABELS, and without MOST_MISTAKES."""
    monkeypatch.setattr(tables, "MOST_LABELS", 2)
    references = torch.arange(1000)
    predictions = references.clone()
    predictions[700], predictions[3] = 3, 700
    probabilities = torch.nn.functional.one_hot(predictions, 1000).float()
    made = {"references": references, "probabilities": probabilities, "predictions": predictions}
    found = label_tables(made, [str(i) for i in range(1000)], lambda i: {})
    assert found["confusion"] == [{"label": "3", "3": 0, "700": 1}, {"label": "700", "3": 1, "700": 0}]
    assert [row["label"] for row in found["classes"]] == ["3", "700"]
    everything_wrong = made | {"references": (references + 1) % 1000}
    assert len(label_tables(everything_wrong, [str(i) for i in range(1000)], lambda i: {})["mistakes"]) == 24


def test_a_picture_is_the_image_itself() -> None:
    _, digits = bundled_digits()
    made = outputs([int(digits.labels[5])] * 6, [[0.5, 0, 0, 0, 0, 0, 0, 0, 0, 0.5]] * 6)
    made["predictions"] = torch.where(torch.arange(6) == 5, (made["references"] + 1) % 10, made["references"])
    (mistake,) = Mnist().tables(made, digits)["mistakes"]
    head, _, data = mistake["image"].partition(",")
    assert head == "data:image/png;base64"
    picture = Image.open(io.BytesIO(b64decode(data)))
    assert (picture.mode, picture.size) == ("L", (28, 28))
    assert np.array_equal(np.asarray(picture), digits.images[5].numpy())


def test_a_run_records_them_at_each_evaluation_alike_on_any_number_of_processes(launch: Launch, whole: Whole) -> None:
    """Tried with the tables of the first process's outputs alone: 180 examples on two processes. An evaluation's
    tables stay below 30 KB."""
    alone = whole("cpu", *SHORT)
    several = whole("ddp", *SHORT, processes=2)
    for run in (alone, several):
        evaluations = [record for record in run.records if "eval/loss" in record]
        assert [record["step"] for record in evaluations] == [6, 12]
        for record in evaluations:
            confusion, classes = record["eval/confusion"], record["eval/classes"]
            right = sum(row[row["label"]] for row in confusion)
            assert right / 359 == pytest.approx(record["eval/accuracy"])
            assert sum(sum(row[str(i)] for i in range(10)) for row in confusion) == 359
            assert [row["examples"] for row in classes] == bundled_digits()[1].labels.bincount().tolist()
            mistakes = record["eval/mistakes"]
            assert len(mistakes) == min(24, 359 - right)
            assert [row["confidence"] for row in mistakes] == sorted((r["confidence"] for r in mistakes), reverse=True)
            assert all(bundled_digits()[1].labels[row["index"]] == int(row["label"]) for row in mistakes)
    lines = (alone.folder / "metrics.jsonl").read_text().splitlines()
    assert max(map(len, lines)) < 30_000
    for one, two in zip(alone.records, several.records, strict=True):
        for name in ("eval/confusion", "eval/classes"):
            assert one.get(name) == two.get(name)
        for row, other in zip(one.get("eval/mistakes", []), two.get("eval/mistakes", []), strict=True):
            assert row == other | {"confidence": pytest.approx(other["confidence"], abs=1e-4)}
