"""What a task's methods must return, the metrics and tables of an evaluation, and its pictures."""

import io
import json
from base64 import b64decode
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from PIL import Image
from torch.nn.functional import binary_cross_entropy_with_logits, cross_entropy, mse_loss
from torch.utils.data import ChainDataset, TensorDataset

from src.config.errors import UserError
from src.tasks import load_metric, tables
from src.tasks.base import PICTURE, Task
from src.tasks.mnist import Digits, Mnist, MnistCnn, bundled_digits
from src.tasks.tables import label_tables
from src.tasks.task_checks import MUST_RETURN, require_right, require_sum
from src.training.evaluation import evaluate_on_one_process
from tests.faults.runs import evaluations
from tests.launching import Whole

SHORT = ("--max_steps=6", "--eval_every=3", "--task.dropout=0", "--task.rotation=0",
         "--optim.lr=1e-4")  # fmt: skip  # small, as in test_parity.py


def outputs(references: list[int], probabilities: list[list[float]]) -> dict[str, Any]:
    made = torch.tensor(probabilities)
    return {"references": torch.tensor(references), "probabilities": made, "predictions": made.argmax(1)}


def test_mistakes_come_most_confident_first_and_labels_are_counted() -> None:
    found = outputs([0, 0, 1, 1, 1], [[0.9, 0.1, 0], [0.4, 0.6, 0], [0.8, 0.2, 0], [0.1, 0.9, 0], [0.7, 0, 0.3]])
    made = label_tables(found, ["no", "yes", "maybe"], lambda i: {"text": f"text {i}"})
    assert [*made["mistakes"][0].values()] == ["text 2", "yes", "no", pytest.approx(0.8), 2]
    assert [row["index"] for row in made["mistakes"]] == [2, 4, 1]
    assert [[*row.values()] for row in made["confusion"]] == [["no", 1, 1, 0], ["yes", 2, 1, 0], ["maybe", 0, 0, 0]]
    by_label = [["no", 2, 0.5], ["yes", 3, pytest.approx(1 / 3)], ["maybe", 0, None]]
    assert [[*row.values()] for row in made["classes"]] == by_label
    assert not label_tables(outputs([0], [[0.9, 0.1]]), ["no", "yes"], lambda i: {})["mistakes"]


def test_tables_stay_small_with_many_labels_and_mistakes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 100 labels, the two that are confused are shown."""
    monkeypatch.setattr(tables, "MAX_LABELS", 2)
    names, references, predicted = [str(i) for i in range(100)], [*range(100)], [*range(100)]
    predicted[3], predicted[70] = 70, 3
    confused = torch.eye(100)[predicted].tolist()
    found = label_tables(outputs(references, confused), names, lambda i: {})
    assert found["confusion"] == [{"label": "3", "3": 0, "70": 1}, {"label": "70", "3": 1, "70": 0}]
    assert [row["label"] for row in found["classes"]] == ["3", "70"]
    everything_wrong = outputs(references[::-1], confused)
    assert len(label_tables(everything_wrong, names, lambda i: {})["mistakes"]) == 24


def pixels_of(cell: str) -> Any:
    assert cell.startswith(PICTURE)
    return np.asarray(Image.open(io.BytesIO(b64decode(cell.removeprefix(PICTURE)))))


def test_arrays_tensors_and_images_are_shown_exactly() -> None:
    """Of a mask, True is white."""
    pixels = np.arange(5 * 4 * 3, dtype=np.uint8).reshape(5, 4, 3)
    for image in (pixels, torch.from_numpy(pixels), Image.fromarray(pixels)):
        assert np.array_equal(pixels_of(tables.picture(image)), pixels)
    grey = pixels[..., 0]
    assert np.array_equal(pixels_of(tables.picture(grey)), grey)
    for mask in (grey > 20, torch.from_numpy(grey > 20)):
        assert np.array_equal(pixels_of(tables.picture(mask)) > 0, grey > 20)


@pytest.mark.parametrize("image", [torch.rand(4, 4), np.zeros((4, 4), np.int64), torch.zeros(3, 4, 4).byte()])
def test_a_picture_without_clear_colours_is_refused(image: Any) -> None:
    """Floats, labels and channels first."""
    with pytest.raises(ValueError, match=r"is no picture: it needs uint8 or bool of shape \(H, W\) or \(H, W, 3\)"):
        tables.picture(image)


def test_a_run_records_the_same_tables_on_any_number_of_processes(whole: Whole) -> None:
    """In less than 30 KB an evaluation, with the images themselves."""
    _, digits = bundled_digits()
    alone, several = (evaluations(whole(yaml, *SHORT)) for yaml in ("cpu", "ddp"))
    for one, two in zip(alone, several, strict=True):
        assert len(json.dumps(one)) < 30_000
        assert sum(row["examples"] for row in one["eval/classes"]) == 359
        assert one["eval/classes"] == two["eval/classes"]
        assert one["eval/confusion"] == two["eval/confusion"]
        for row, other in zip(one["eval/mistakes"], two["eval/mistakes"], strict=True):
            assert row == other | {"confidence": pytest.approx(other["confidence"], abs=1e-4)}
            assert np.array_equal(pixels_of(row["image"]), digits.images[row["index"]].numpy())


def test_accuracy_f1_and_matthews_are_the_textbooks() -> None:
    labels = {"predictions": torch.tensor([1, 1, 0, 0, 1]), "references": torch.tensor([1, 0, 0, 1, 1])}
    assert load_metric("Accuracy").compute(**labels, f1="binary") == {"accuracy": 0.6, "f1": pytest.approx(2 / 3)}
    assert load_metric("Matthews").compute(**labels) == {"matthews_correlation": pytest.approx((2 * 1 - 1 * 1) / 6)}
    several = {"predictions": [0, 1, 2, 2], "references": [0, 1, 2, 1]}
    f1 = (1 + 2 / 3 + 2 / 3) / 3
    assert load_metric("Accuracy").compute(**several, f1="macro") == {"accuracy": 0.75, "f1": pytest.approx(f1)}


LOSS, ROWS = torch.tensor(3.0), torch.zeros(4)
DATASET = TensorDataset(ROWS)


@pytest.mark.parametrize(
    ("method", "right", "wrong"),
    [
        ("build_datasets", [DATASET, [2, 3]], [DATASET, (DATASET, ChainDataset([])), (DATASET,) * 3]),
        ("loss", LOSS, [3.0, ROWS]),
        ("evaluate", [LOSS, {"a": ROWS, "b": torch.zeros(4, 2)}], [LOSS, (LOSS, ROWS), (LOSS, {"a": LOSS})]),
        ("metrics", {"a": 1, "b": np.float64(0.5)}, [{"accuracy": "good"}, {"accuracy": LOSS}, 0.5]),
    ],
)
def test_a_method_that_returns_something_else_is_named(method: str, right: Any, wrong: list[Any]) -> None:
    require_right(Mnist(), method, right)
    for value in wrong:
        with pytest.raises(UserError) as error:
            require_right(Mnist(), method, value)
        assert str(error.value) == f"Mnist.{method} must return {MUST_RETURN[method]}"


class Kept(Mnist):
    kept_outputs: ClassVar[dict[str, int]] = {"probabilities": 5}


@pytest.mark.parametrize("batch_size", [1, 3, 16])
def test_some_outputs_are_kept_for_the_first_examples_only(batch_size: int) -> None:
    """They are no columns of the predictions, which have a row an example. Several processes: test_add_task.py."""
    task, digits = Kept(), bundled_digits()[1].__getitems__([*range(12)])
    dataset, model = Digits(digits["images"], digits["labels"]), MnistCnn().eval()
    found, whole = (
        evaluate_on_one_process(t, model, dataset, batch_size, torch.device("cpu"))[1] for t in (task, Mnist())
    )
    assert torch.allclose(found["probabilities"], whole["probabilities"][:5])
    assert torch.equal(found["references"], digits["labels"])
    assert Task.predictions(task, found, dataset).keys() == {"predictions", "references"}


def test_an_output_to_keep_that_evaluate_lacks_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Kept, "kept_outputs", {"masks": 5})
    with pytest.raises(UserError, match="Kept.kept_outputs: evaluate returns no 'masks'"):
        evaluate_on_one_process(Kept(), MnistCnn().eval(), bundled_digits()[1], 64, torch.device("cpu"))


LOGITS, LABELS = torch.randn(16, 5, 8, 8, requires_grad=True), torch.randint(0, 5, (16, 8, 8))
HALF = torch.where(torch.arange(8) < 4, -100, LABELS)
"""16 images of 64 labels each, of which half are ignored in HALF."""
EACH, SUM, MEAN = (cross_entropy(LOGITS, LABELS, reduction=how) for how in ("none", "sum", "mean"))
TRUTH = LABELS.float() / 5
BINARY = binary_cross_entropy_with_logits(LOGITS[:, 0], TRUTH, reduction="sum")
SQUARES = LOGITS.square().sum()
PRODUCTS = torch.ones((), requires_grad=True)
for _ in range(60):  # the paths through them double with each
    PRODUCTS = PRODUCTS + PRODUCTS * 0.1


@pytest.mark.parametrize(
    ("loss", "targets", "labels"),
    [
        *((SUM, 16, 1024), (EACH.sum((1, 2)).sum().float(), 16, 1024), ((EACH * (HALF >= 0)).sum(), 16, 512)),
        *((BINARY + SQUARES, 16, 1024), (SQUARES + 0.5 * BINARY, 16, 512)),
        (cross_entropy(LOGITS, HALF, reduction="sum"), 16, 512),
        (cross_entropy(LOGITS, LABELS, reduction="sum", label_smoothing=0.1), 16, 922),
        (mse_loss(LOGITS[:, 0], TRUTH, reduction="sum"), 16, 1024),
        # right: each label is counted
        *((SUM, 1024, 0), (cross_entropy(LOGITS, HALF, reduction="sum"), 512, 0), (MEAN * 1024, 1024, 0)),
        # right: a mean over the labels of each image, however large
        *((EACH.mean((1, 2)).sum(), 16, 0), (MEAN * 16, 16, 0), (SUM / 64, 16, 0), (SUM * (1 / 64), 16, 0)),
        (mse_loss(1e6 * LOGITS[:, 0, 0, 0], TRUTH[:, 0, 0], reduction="sum"), 16, 0),
        # right: a mean of one target, and nothing
        *((MEAN, 1, 0), (cross_entropy(LOGITS[:0], LABELS[:0], reduction="sum"), 16, 0)),
        # autograd can't tell
        *((MEAN + SQUARES, 1024, 0), (torch.tensor(1e9), 16, 0), (PRODUCTS, 1, 0)),
    ],
)
def test_a_sum_over_more_labels_than_are_counted_is_noted_once(
    monkeypatch: pytest.MonkeyPatch, loss: torch.Tensor, targets: int, labels: int
) -> None:
    said = list[str]()
    monkeypatch.setattr("src.tasks.label_note.say", said.append)
    monkeypatch.setattr("src.tasks.label_note.SAID", set())
    monkeypatch.setattr(Mnist, "count", lambda *_: {"targets": targets})
    for _ in range(2):
        require_sum(Mnist(), loss, None)
    note = f"NOTE: Mnist.loss sums over {labels:,} labels where Mnist.count counts {targets} targets, so "
    assert [text[: len(note)] for text in said] == [note] * bool(labels)


@pytest.mark.parametrize("loss", [MEAN, mse_loss(LOGITS[:, 0], TRUTH)])
def test_a_mean_over_several_targets_is_refused(monkeypatch: pytest.MonkeyPatch, loss: torch.Tensor) -> None:
    monkeypatch.setattr(Mnist, "count", lambda *_: {"targets": 1024})
    with pytest.raises(UserError, match="must return the loss summed"):
        require_sum(Mnist(), loss, None)
