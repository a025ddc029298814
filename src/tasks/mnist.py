"""Handwritten digits with the CNN of pytorch/examples: `--task.name=mnist`."""

import io
from base64 import b64encode
from typing import Annotated, Any, ClassVar, Literal

import torch
from PIL import Image
from pydantic import Field, NonNegativeInt
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from src.data.mnist import Digits, bundled_digits, mnist
from src.models.mnist_cnn import MnistCnn
from src.tasks import load_metric
from src.tasks.base import PICTURE, Table, Task
from src.tasks.tables import label_columns, label_tables


class Mnist(Task):
    """Tells which digit an image shows."""

    name: Literal["mnist"] = "mnist"
    """The task to train."""
    source: Literal["mnist", "digits"] = "mnist"
    """mnist: 60,000 + 10,000 images, downloaded once; digits: 1,438 + 359 that come with scikit-learn."""
    data_dir: str = "data"
    """Folder with the four IDX files of MNIST, here or in MNIST/raw; they are downloaded if missing."""
    shift: Annotated[NonNegativeInt, Field(le=8)] = 2
    """Largest shift of a training image along each axis, in pixels, drawn anew in each epoch."""
    rotation: Annotated[float, Field(ge=0, le=180)] = 10.0
    """Largest rotation of a training image, in degrees, drawn anew in each epoch."""
    dropout: Annotated[float, Field(ge=0, lt=2)] = 0.2
    """Scales the model's two dropout rates, 0.25 and 0.5; 0 switches them off."""
    label_smoothing: Annotated[float, Field(ge=0, lt=1)] = 0.1
    """Share of the training target that all ten digits share equally; the evaluation's loss has none."""

    metric_names: ClassVar[tuple[str, ...]] = ("accuracy",)

    def build_model(self) -> nn.Module:
        return MnistCnn(dropout=self.dropout)

    def build_datasets(self) -> tuple[Digits, Digits]:
        return bundled_digits() if self.source == "digits" else mnist(self.data_dir)

    def fingerprint(self, dataset: Digits) -> str:
        return dataset.checksum()

    def augmented(self, train: Any, seed: list[int]) -> Any:
        return train.moved(self.rotation, self.shift, seed) if self.rotation or self.shift else train

    def to_device(self, dataset: Any, device: torch.device) -> Any:
        return Digits(dataset.images.to(device), dataset.labels.to(device))  # 47 MB for MNIST's training set

    def collate(self, samples: Any) -> dict[str, Tensor]:
        return samples  # Digits.__getitems__ returns a whole batch

    def count_targets(self, batch: dict[str, Any]) -> int:
        return len(batch["labels"])

    def loss(self, model: nn.Module, batch: Any) -> tuple[Tensor, int]:
        logits, labels = model(batch["images"]).float(), batch["labels"]
        smoothed = cross_entropy(logits, labels, reduction="sum", label_smoothing=self.label_smoothing)
        return smoothed, len(labels)

    def evaluate(self, model: nn.Module, batch: Any) -> tuple[Tensor, int, dict[str, Tensor]]:
        logits, labels = model(batch["images"]).float(), batch["labels"]
        outputs = {"predictions": logits.argmax(1), "references": labels, "probabilities": logits.softmax(1)}
        return cross_entropy(logits, labels, reduction="sum"), len(labels), outputs

    def import_metrics(self) -> None:
        load_metric("Accuracy")

    def metrics(self, outputs: dict[str, Tensor]) -> dict[str, float]:
        return load_metric("Accuracy").compute(predictions=outputs["predictions"], references=outputs["references"])

    def tables(self, outputs: dict[str, Tensor], dataset: Any) -> dict[str, Table]:
        def show(index: int) -> dict[str, str]:
            image, png = dataset.__getitems__([index])["images"][0], io.BytesIO()
            Image.fromarray(image.numpy(force=True)).save(png, "png")
            return {"image": PICTURE + b64encode(png.getvalue()).decode()}

        return label_tables(outputs, list("0123456789"), show)

    def predictions(self, outputs: dict[str, Tensor], dataset: Any) -> dict[str, list[Any]]:
        return {"index": list(range(len(dataset))), **label_columns(outputs, list("0123456789"))}
