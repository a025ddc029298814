"""What a task's methods return, the metrics of `evaluate`, and the tables of an evaluation."""

import contextlib
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
    """Tried with the confidence in the right label, and with the confusion's rows and columns exchanged."""
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
    """Two of 100 labels are confused: they are shown. Tried without MAX_LABELS, and without MAX_MISTAKES."""
    monkeypatch.setattr(tables, "MAX_LABELS", 2)
    names, references, predicted = [str(i) for i in range(100)], [*range(100)], [*range(100)]
    predicted[3], predicted[70] = 70, 3
    confused = torch.eye(100)[predicted].tolist()
    found = label_tables(outputs(references, confused), names, lambda i: {})
    assert found["confusion"] == [{"label": "3", "3": 0, "70": 1}, {"label": "70", "3": 1, "70": 0}]
    assert [row["label"] for row in found["classes"]] == ["3", "70"]
    everything_wrong = outputs(references[::-1], confused)
    assert len(label_tables(everything_wrong, names, lambda i: {})["mistakes"]) == 24


def shown(cell: str) -> Image.Image:
    assert cell.startswith(PICTURE)
    return Image.open(io.BytesIO(b64decode(cell.removeprefix(PICTURE))))


def test_arrays_tensors_and_images_can_be_shown() -> None:
    """Exactly: of a mask, True is white. Tried with bool as uint8: it is black all over."""
    pixels = np.arange(5 * 4 * 3, dtype=np.uint8).reshape(5, 4, 3)
    for image in (pixels, torch.from_numpy(pixels), Image.fromarray(pixels)):
        assert np.array_equal(np.asarray(shown(tables.picture(image))), pixels)
    grey = pixels[..., 0]
    assert np.array_equal(np.asarray(shown(tables.picture(torch.from_numpy(pixels)[..., 0]))), grey)
    for mask in (grey > 20, torch.from_numpy(grey > 20)):
        assert np.array_equal(np.asarray(shown(tables.picture(mask)).convert("L")), 255 * (grey > 20))


@pytest.mark.parametrize(
    "image", [torch.rand(4, 4), np.zeros((4, 4), np.int64), torch.zeros(3, 4, 4, dtype=torch.uint8)]
)
def test_a_picture_that_would_have_to_be_guessed_is_refused(image: Any) -> None:
    """Floats, labels and channels first. Tried without: floats are all black."""
    with pytest.raises(ValueError, match=r"is no picture: it needs uint8 or bool of shape \(H, W\) or \(H, W, 3\)"):
        tables.picture(image)


def test_a_picture_is_the_image_itself() -> None:
    _, digits = bundled_digits()
    made = outputs(digits.labels[:6].tolist(), torch.eye(10)[digits.labels[:6]].tolist())
    made["predictions"][5] += 1
    (mistake,) = Mnist().tables(made, digits)["mistakes"]
    picture = shown(mistake["image"])
    assert picture.mode == "L"
    assert np.array_equal(np.asarray(picture), digits.images[5].numpy())


def test_a_run_records_them_at_each_evaluation_alike_on_any_number_of_processes(whole: Whole) -> None:
    """Tried with the first process's outputs alone: 180 examples on two. They stay below 30 KB."""
    alone, several = (evaluations(whole(yaml, *SHORT)) for yaml in ("cpu", "ddp"))
    for one, two in zip(alone, several, strict=True):
        assert len(json.dumps(one)) < 30_000
        assert sum(row["examples"] for row in one["eval/classes"]) == 359
        assert one["eval/classes"] == two["eval/classes"]
        assert one["eval/confusion"] == two["eval/confusion"]
        for row, other in zip(one["eval/mistakes"], two["eval/mistakes"], strict=True):
            assert row == other | {"confidence": pytest.approx(other["confidence"], abs=1e-4)}


def test_accuracy_f1_and_matthews_are_the_textbooks() -> None:
    labels = {"predictions": torch.tensor([1, 1, 0, 0, 1]), "references": torch.tensor([1, 0, 0, 1, 1])}
    assert load_metric("F1").compute(**labels, labels=2) == {"f1": pytest.approx(2 / 3)}
    assert load_metric("Accuracy").compute(**labels) == {"accuracy": 0.6}
    assert load_metric("Matthews").compute(**labels) == {"matthews_correlation": pytest.approx((2 * 1 - 1 * 1) / 6)}
    several = {"predictions": [0, 1, 2, 2], "references": [0, 1, 2, 1]}
    assert load_metric("F1").compute(**several, labels=3) == {"f1": pytest.approx((1 + 2 / 3 + 2 / 3) / 3)}


LOSS, ROWS = torch.tensor(3.0), torch.zeros(4)
DATASET = TensorDataset(ROWS)
WRONG: dict[str, list[Any]] = {
    "build_datasets": [DATASET, (DATASET, ChainDataset([])), (DATASET,) * 3],
    "loss": [3.0, ROWS],
    "evaluate": [LOSS, (LOSS, ROWS), (LOSS, {"a": LOSS})],
    "metrics": [{"accuracy": "good"}, {"accuracy": LOSS}, 0.5],
}
RIGHT: dict[str, Any] = {
    "build_datasets": [DATASET, [2, 3]],
    "loss": LOSS,
    "evaluate": [LOSS, {"a": ROWS, "b": torch.zeros(4, 2)}],
    "metrics": {"accuracy": 1, "other": np.float64(0.5)},
}


@pytest.mark.parametrize("method", list(MUST_RETURN))
def test_a_method_that_returns_something_else_is_named(method: str) -> None:
    for value in WRONG[method]:
        with pytest.raises(UserError) as error:
            require_right(Mnist(), method, value)
        assert str(error.value) == f"Mnist.{method} must return {MUST_RETURN[method]}"
    require_right(Mnist(), method, RIGHT[method])


class Kept(Mnist):
    kept_outputs: ClassVar[dict[str, int]] = {"probabilities": 5}


@pytest.mark.parametrize("batch_size", [1, 3, 16])
def test_some_outputs_are_kept_for_the_first_examples_alone(batch_size: int) -> None:
    """On one process; they are no columns of the predictions, which have a row per example. Several processes:
    test_task.py. Tried with each batch's first five."""
    task, digits = Kept(), bundled_digits()[1].__getitems__([*range(12)])
    dataset, model = Digits(digits["images"], digits["labels"]), MnistCnn().eval()
    found, whole = (
        evaluate_on_one_process(t, model, dataset, batch_size, torch.device("cpu"))[1] for t in (task, Mnist())
    )
    assert found["probabilities"].shape == (5, 10)
    assert torch.allclose(found["probabilities"], whole["probabilities"][:5])
    assert torch.equal(found["references"], digits["labels"])
    assert Task.predictions(task, found, dataset).keys() == {"predictions", "references"}


def test_an_output_to_keep_that_evaluate_does_not_return_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Kept, "kept_outputs", {"masks": 5})
    with pytest.raises(UserError, match="Kept.kept_outputs: evaluate returns no 'masks'"):
        evaluate_on_one_process(Kept(), MnistCnn().eval(), bundled_digits()[1], 64, torch.device("cpu"))


IMAGES, LABELS = torch.randn(16, 5, 8, 8, requires_grad=True), torch.randint(0, 5, (16, 8, 8))
HALF = LABELS.clone()
HALF[:, :4] = -100
EACH, ALL = cross_entropy(IMAGES, LABELS, reduction="none"), cross_entropy(IMAGES, LABELS, reduction="sum")
TRUTH = LABELS.float() / 5
BINARY = binary_cross_entropy_with_logits(IMAGES[:, 0], TRUTH, reduction="sum")


@pytest.mark.parametrize(
    ("loss", "labels"),
    [
        (ALL, 1024),
        (EACH.sum((1, 2)).sum().float(), 1024),
        (cross_entropy(IMAGES, HALF, reduction="sum"), 512),
        ((EACH * (HALF >= 0)).sum(), 512),
        (BINARY + IMAGES.square().sum(), 1024),
        (IMAGES.square().sum() + 0.5 * BINARY, 512),
        (mse_loss(IMAGES[:, 0], TRUTH, reduction="sum"), 1024),
        (cross_entropy(IMAGES, LABELS, reduction="sum", label_smoothing=0.1), 922),
    ],
)
def test_a_sum_over_more_labels_than_are_counted_is_said_once(
    monkeypatch: pytest.MonkeyPatch, loss: torch.Tensor, labels: int
) -> None:
    """Where autograd tells how many there are; not if they are counted. Tried without a mask's mean: 1,024 of 512."""
    said = list[str]()
    monkeypatch.setattr("src.tasks.label_note.say", said.append)
    monkeypatch.setattr("src.tasks.label_note.SAID", set())
    for number, lines in ((1024, 0), (labels, 0), (16, 1), (16, 1)):
        monkeypatch.setattr(Mnist, "count", lambda *_, number=number: {"targets": number})
        require_sum(Mnist(), loss, None)
        assert len(said) == lines
    assert said[0].startswith(f"NOTE: Mnist.loss sums over {labels:,} labels where Mnist.count counts 16 targets, so ")


@pytest.mark.parametrize(
    "loss",
    [
        EACH.mean((1, 2)).sum(), cross_entropy(IMAGES, LABELS) * 16, ALL / 64, ALL * (1 / 64),
        mse_loss(1e6 * IMAGES[:, 0, 0, 0], TRUTH[:, 0, 0], reduction="sum"),
        cross_entropy(100 * IMAGES[:, :, 0, 0], LABELS[:, 0, 0], reduction="sum"),
        cross_entropy(IMAGES[:0], LABELS[:0], reduction="sum"), torch.tensor(1e9),
    ],
)  # fmt: skip
def test_a_loss_per_target_is_right_however_large(monkeypatch: pytest.MonkeyPatch, loss: torch.Tensor) -> None:
    """A mean over each image's labels, large errors, nothing, and what autograd knows nothing about."""
    monkeypatch.setattr("src.tasks.label_note.say", None)
    monkeypatch.setattr(Mnist, "count", lambda *_: {"targets": 16})
    require_sum(Mnist(), loss, None)


def test_a_sum_of_many_products_takes_no_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tried without a limit: the paths through them double with each."""
    monkeypatch.setattr(Mnist, "count", lambda *_: {"targets": 1})
    number = torch.ones((), requires_grad=True)
    for _ in range(60):
        number = number + number * 0.1
    require_sum(Mnist(), number, None)


def test_a_mean_is_refused_where_autograd_tells(monkeypatch: pytest.MonkeyPatch) -> None:
    """And nothing that may be a sum: a mean of one target, times their number, or beside something else."""
    logits, labels = torch.randn(4, 3, requires_grad=True), torch.tensor([0, 1, 2, 0])
    mean = cross_entropy(logits, labels)
    squares = mse_loss(logits, logits.detach() + 1)
    for loss, targets, is_sum in (
        (mean, 4, False), (squares, 12, False), (mean, 1, True), (mean * 4, 4, True),
        (cross_entropy(logits, labels, reduction="sum"), 4, True), (mean + logits.square().sum(), 4, True),
    ):  # fmt: skip
        monkeypatch.setattr(Mnist, "count", lambda *_, number=targets: {"targets": number})
        with contextlib.nullcontext() if is_sum else pytest.raises(UserError, match="must return the loss summed"):
            require_sum(Mnist(), loss, None)
