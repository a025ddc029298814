"""The tables of an evaluation: which examples, labels and numbers a person gets to see."""

import io
import json
from base64 import b64decode
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from src.tasks import tables
from src.tasks.base import PICTURE
from src.tasks.mnist import Mnist, bundled_digits
from src.tasks.tables import label_tables
from tests.launching import Whole

SHORT = ("--max_steps=6", "--eval_every=3", "--task.dropout=0", "--task.rotation=0",
         "--optim.lr=1e-4")  # fmt: skip  # small, as in test_parity.py


def outputs(references: list[int], probabilities: list[list[float]]) -> dict[str, Any]:
    made = torch.tensor(probabilities)
    return {"references": torch.tensor(references), "probabilities": made, "predictions": made.argmax(1)}


def test_mistakes_come_most_confident_first_and_labels_are_counted() -> None:
    """Tried with the confidence in the right label in place of the predicted one: another order. Tried with rows and
    columns of the confusion exchanged."""
    found = outputs([0, 0, 1, 1, 1], [[0.9, 0.1, 0], [0.4, 0.6, 0], [0.8, 0.2, 0], [0.1, 0.9, 0], [0.7, 0, 0.3]])
    made = label_tables(found, ["no", "yes", "maybe"], lambda i: {"text": f"text {i}"})
    assert made["mistakes"][0] == {
        "text": "text 2", "label": "yes", "prediction": "no", "confidence": pytest.approx(0.8), "index": 2,
    }  # fmt: skip
    assert [row["index"] for row in made["mistakes"]] == [2, 4, 1]
    assert [[*row.values()] for row in made["confusion"]] == [["no", 1, 1, 0], ["yes", 2, 1, 0], ["maybe", 0, 0, 0]]
    assert [[*row.values()] for row in made["classes"]] == [
        ["no", 2, 0.5], ["yes", 3, pytest.approx(1 / 3)], ["maybe", 0, None],
    ]  # fmt: skip
    assert "mistakes" not in label_tables(outputs([0], [[0.9, 0.1]]), ["no", "yes"], lambda i: {})


def test_tables_stay_small_whatever_the_number_of_labels_and_mistakes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two of 100 labels are confused: they are shown. Tried without MOST_LABELS, and without MOST_MISTAKES."""
    monkeypatch.setattr(tables, "MOST_LABELS", 2)
    names, references, predicted = [str(i) for i in range(100)], [*range(100)], [*range(100)]
    predicted[3], predicted[70] = 70, 3
    confused = torch.eye(100)[predicted].tolist()
    found = label_tables(outputs(references, confused), names, lambda i: {})
    assert found["confusion"] == [{"label": "3", "3": 0, "70": 1}, {"label": "70", "3": 1, "70": 0}]
    assert [row["label"] for row in found["classes"]] == ["3", "70"]
    everything_wrong = outputs(references[::-1], confused)
    assert len(label_tables(everything_wrong, names, lambda i: {})["mistakes"]) == 24


def test_a_picture_is_the_image_itself() -> None:
    _, digits = bundled_digits()
    made = outputs(digits.labels[:6].tolist(), torch.eye(10)[digits.labels[:6]].tolist())
    made["predictions"][5] += 1
    (mistake,) = Mnist().tables(made, digits)["mistakes"]
    assert mistake["image"].startswith(PICTURE)
    picture = Image.open(io.BytesIO(b64decode(mistake["image"].removeprefix(PICTURE))))
    assert picture.mode == "L"
    assert np.array_equal(np.asarray(picture), digits.images[5].numpy())


def test_a_run_records_them_at_each_evaluation_alike_on_any_number_of_processes(whole: Whole) -> None:
    """Tried with the tables of the first process's outputs alone: 180 examples on two processes. An evaluation's
    tables stay below 30 KB."""
    alone, several = (
        [record for record in whole(yaml, *SHORT).records if "eval/loss" in record] for yaml in ("cpu", "ddp")
    )
    for one, two in zip(alone, several, strict=True):
        assert len(json.dumps(one)) < 30_000
        assert sum(row["examples"] for row in one["eval/classes"]) == 359
        assert one["eval/classes"] == two["eval/classes"]
        assert one["eval/confusion"] == two["eval/confusion"]
        for row, other in zip(one["eval/mistakes"], two["eval/mistakes"], strict=True):
            assert row == other | {"confidence": pytest.approx(other["confidence"], abs=1e-4)}
