"""Metrics through `evaluate`, without a network; adding one takes a class."""

import pytest
import torch

from src.tasks import load_metric


@pytest.fixture(autouse=True)
def _no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("socket.socket.connect", lambda *_: pytest.fail("a metric went to the network"))


def test_what_is_no_label_or_has_no_partner_is_refused() -> None:
    for references in ([1, 2], ["one", "two", "three"], [1.5, 2.0, 3.0]):
        with pytest.raises(ValueError, match="Mismatch in the number|don't match the expected format"):
            load_metric("Accuracy").compute(predictions=torch.tensor([1, 2, 3]), references=references)


def test_accuracy_f1_and_matthews_are_the_textbooks() -> None:  # room: text
    labels = {"predictions": torch.tensor([1, 1, 0, 0, 1]), "references": torch.tensor([1, 0, 0, 1, 1])}
    f1 = load_metric("F1")
    assert f1.compute(**labels, labels=2) == {"f1": pytest.approx(2 / 3)}  # 2 right, 1 too many, 1 missed
    assert load_metric("Accuracy").compute(**labels) == {"accuracy": 0.6}
    assert load_metric("Matthews").compute(**labels) == {"matthews_correlation": pytest.approx((2 * 1 - 1 * 1) / 6)}
    assert f1.compute(**labels, labels=3) == {"f1": pytest.approx((2 / 3 + 1 / 2) / 2)}  # a label that none has
    several = {"predictions": [0, 1, 2, 2], "references": [0, 1, 2, 1]}
    assert f1.compute(**several, labels=3) == {"f1": pytest.approx((1 + 2 / 3 + 2 / 3) / 3)}
