"""Handwritten digits and the CNN of pytorch/examples: `--task.name=mnist`. Model, data and task."""

import contextlib
import hashlib
from dataclasses import dataclass, replace
from importlib.metadata import distribution
from pkgutil import resolve_name
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from src.config.errors import as_user_error
from src.tasks import load_metric
from src.tasks.base import Columns, Counts, Metrics, Tables, Task, Tensors
from src.tasks.mnist_settings import MnistSettings
from src.tasks.tables import label_columns, label_tables, picture


class MnistCnn(nn.Module):
    """Classifies images with 1,199,882 parameters. Source:
    https://github.com/pytorch/examples/blob/main/mnist/main.py"""

    _no_split_modules = ["Conv2d", "Linear"]

    def __init__(self, dropout: float = 1.0) -> None:
        """Create the layers; `dropout` scales both dropout rates."""
        super().__init__()
        self.conv1 = nn.Conv2d(1, 32, 3)
        self.conv2 = nn.Conv2d(32, 64, 3)
        self.dropout1 = nn.Dropout(0.25 * dropout)
        self.dropout2 = nn.Dropout(0.5 * dropout)
        self.fc1 = nn.Linear(9216, 128)
        self.fc2 = nn.Linear(128, 10)

    def forward(self, images: Tensor) -> Tensor:
        """Return logits of shape (batch, 10) for images of shape (batch, 28, 28), uint8."""
        # MNIST's mean and standard deviation, as everyone uses them
        x = (images.unsqueeze(1).float() / 255 - 0.1307) / 0.3081
        # on a GPU, faster in half precision; on Apple's, channels last give wrong gradients (pytorch#107214, #175190)
        if torch.is_autocast_enabled(x.device.type) and not x.is_mps:
            x = x.to(memory_format=torch.channels_last)
        x = F.relu(self.conv1(x))
        x = self.dropout1(F.relu(F.max_pool2d(self.conv2(x), 2)))  # as ReLU before pooling, on a quarter of the values
        x = self.dropout2(F.relu(self.fc1(x.flatten(1))))
        return self.fc2(x)


@dataclass(frozen=True)
class Digits:
    """Holds images of shape (examples, 28, 28), uint8, and their labels of shape (examples,), int64."""

    images: Tensor
    labels: Tensor
    transforms: Tensor | None = None
    """For each image, the affine map from its pixels to where they come from, as torch's affine_grid takes it; shape
    (examples, 2, 3). Images are transformed when they are fetched, by the process that trains on them."""

    def __len__(self) -> int:
        return len(self.labels)

    def __getitems__(self, indices: list[int]) -> Tensors:
        index = torch.from_numpy(np.array(indices))  # torch.tensor takes four times as long
        if self.labels.is_cuda:  # from pageable memory, the copy would wait until the device has finished
            index = index.pin_memory()
        index = index.to(self.labels.device, non_blocking=self.labels.is_cuda)
        images = self.images.index_select(0, index)
        if self.transforms is not None:
            grid = F.affine_grid(self.transforms[index], [len(indices), 1, 28, 28], align_corners=False)
            moved = F.grid_sample(images.unsqueeze(1).float(), grid, align_corners=False)
            images = moved.squeeze(1).round().to(torch.uint8)
        return {"images": images, "labels": self.labels.index_select(0, index)}

    def to(self, device: torch.device) -> "Digits":
        """Return the digits in the device's memory: 47 MB for MNIST's training set."""
        return Digits(self.images.to(device), self.labels.to(device))

    def moved(self, rotation: float, shift: int, seed: list[int]) -> "Digits":
        """Return the images rotated by up to `rotation` degrees and shifted by up to `shift` pixels along both axes,
        drawn uniformly from `seed`."""
        random = np.random.default_rng(seed)
        angles = torch.from_numpy(np.radians(random.uniform(-rotation, rotation, len(self)))).float()
        x, y = torch.from_numpy(random.integers(-shift, shift + 1, (len(self), 2)) * (2 / 28)).float().T
        cos, sin = angles.cos(), angles.sin()
        transforms = torch.stack([cos, -sin, x, sin, cos, y], 1).view(-1, 2, 3)
        return replace(self, transforms=transforms.to(self.images.device))


def mnist(data_dir: str) -> tuple[Digits, Digits]:
    """Return MNIST's training and test sets, which torchvision reads from `data_dir` or downloads into it."""
    # imported here: the bundled digits need no torchvision, and one that doesn't match torch cannot be imported
    dataset = resolve_name("torchvision.datasets:MNIST")
    says = (
        f"MNIST could be neither read from {data_dir}/MNIST/raw nor downloaded (delete what is there, set "
        "--task.data_dir, or use the bundled digits: --task.source=digits): "
    )
    # a damaged file can raise nearly anything, and every mirror that is given up on is printed
    with as_user_error(says), contextlib.redirect_stdout(None):
        train, test = (dataset(data_dir, train=is_train, download=True) for is_train in (True, False))
    return Digits(train.data, train.targets), Digits(test.data, test.targets)


def bundled_digits() -> tuple[Digits, Digits]:
    """Return the 1,797 digits in scikit-learn, enlarged to look like MNIST's, with a fixed fifth held out for
    evaluation."""
    file = distribution("scikit-learn").locate_file("sklearn/datasets/data/digits.csv.gz")
    rows = np.loadtxt(str(file), delimiter=",")  # load_digits takes a second to import
    rows = np.random.default_rng(0).permutation(rows)
    small = torch.from_numpy(rows[:, :-1]).view(-1, 1, 8, 8) * (255 / 16)
    large = F.pad(F.interpolate(small, size=20, mode="bilinear"), (4,) * 4)  # MNIST's digits fill 20 x 20 of 28 x 28
    images, labels = large.squeeze(1).round().to(torch.uint8), torch.from_numpy(rows[:, -1]).long()
    split = len(labels) // 5
    return Digits(images[split:], labels[split:]), Digits(images[:split], labels[:split])


class Mnist(MnistSettings, Task):
    """Classifies images of handwritten digits."""

    def build_model(self) -> nn.Module:
        return MnistCnn(dropout=self.dropout)

    def build_datasets(self) -> tuple[Digits, Digits]:
        return bundled_digits() if self.source == "digits" else mnist(self.data_dir)

    def fingerprint(self, dataset: Digits) -> str:
        return hashlib.sha256(b"".join([dataset.images.numpy().data, dataset.labels.numpy().data])).hexdigest()

    def augmented(self, train: Any, seed: list[int]) -> Any:
        return train.moved(self.rotation, self.shift, seed) if self.rotation or self.shift else train

    def collate(self, samples: Any) -> Tensors:
        return samples  # Digits.__getitems__ returns a whole batch

    def count(self, batch: Any) -> Counts:
        return {"targets": len(batch["labels"])}

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        logits = model(batch["images"]).float()
        return F.cross_entropy(logits, batch["labels"], reduction="sum", label_smoothing=self.label_smoothing)

    def evaluate(self, model: nn.Module, batch: Any) -> tuple[Tensor, Tensors]:
        logits, labels = model(batch["images"]).float(), batch["labels"]
        outputs = {"predictions": logits.argmax(1), "references": labels, "probabilities": logits.softmax(1)}
        return F.cross_entropy(logits, labels, reduction="sum"), outputs

    def metrics(self, outputs: Tensors) -> Metrics:
        return load_metric("Accuracy").compute(predictions=outputs["predictions"], references=outputs["references"])

    def tables(self, outputs: Tensors, dataset: Any) -> Tables:
        return label_tables(outputs, list("0123456789"), lambda index: {"image": picture(dataset.images[index])})

    def predictions(self, outputs: Tensors, dataset: Any) -> Columns:
        return {"index": list(range(len(dataset))), **label_columns(outputs, list("0123456789"))}
