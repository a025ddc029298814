"""Metrics through `evaluate`, without a network; adding one takes a class."""

import datasets
import evaluate
import pytest
import torch

from src.tasks.metrics import Accuracy


@pytest.fixture(autouse=True)
def _no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("socket.socket.connect", lambda *_: pytest.fail("a metric went to the network"))


def test_accuracy_is_the_share_of_equal_predictions() -> None:
    predictions, references = torch.tensor([1, 2, 3, 4]), torch.tensor([1, 2, 0, 4])
    assert Accuracy().compute(predictions=predictions, references=references) == {"accuracy": 0.75}


def test_another_metric_takes_one_class_and_combines() -> None:
    class Recall(Accuracy):
        """The share of references of class 1 that were predicted."""

        def _compute(self, predictions: list[int], references: list[int]) -> dict[str, float]:
            found = [p == 1 for p, r in zip(predictions, references, strict=True) if r == 1]
            return {"recall": sum(found) / len(found)}

    both = evaluate.combine([Accuracy(), Recall()])
    values = both.compute(predictions=torch.tensor([1, 0, 1, 0]), references=torch.tensor([1, 1, 0, 0]))
    assert values == {"accuracy": 0.5, "recall": 0.5}
    assert set(Accuracy().features) == {"predictions", "references"}
    assert isinstance(Accuracy().features, datasets.Features)


@pytest.mark.parametrize("references", [[1, 2], ["one", "two", "three"], [1.5, 2.0, 3.0]])
def test_what_is_no_label_or_has_no_partner_is_refused(references: list[object]) -> None:
    with pytest.raises(ValueError, match="Mismatch in the number|don't match the expected format"):
        Accuracy().compute(predictions=torch.tensor([1, 2, 3]), references=references)
