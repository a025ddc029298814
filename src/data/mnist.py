"""Images of digits as one uint8 tensor, fetched a whole batch at a time."""

import contextlib
import hashlib
import io
from dataclasses import dataclass, replace
from importlib.metadata import distribution
from pathlib import Path

import numpy as np
import torch
from PIL import Image, ImageOps
from torch import Tensor
from torch.nn import functional as F

from src.process import UserError, explained

IDX_FILES = ("train-images-idx3-ubyte", "train-labels-idx1-ubyte", "t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte")


@dataclass(frozen=True)
class Digits:
    """Images of shape (examples, 28, 28), uint8, and their labels of shape (examples,), int64."""

    images: Tensor
    labels: Tensor
    transforms: Tensor | None = None
    """Where in an image each of its pixels comes from, as torch's affine_grid takes it, shape (examples, 2, 3). Images
    are moved when they are fetched: each process moves its own, while it trains."""

    def __len__(self) -> int:
        return len(self.labels)

    def __getitems__(self, indices: list[int]) -> dict[str, Tensor]:
        index = torch.from_numpy(np.array(indices))  # torch.tensor takes four times as long
        if self.labels.is_cuda:  # from other memory, the copy would wait until the device has finished
            index = index.pin_memory().to(self.labels.device, non_blocking=True)
        images = self.images.index_select(0, index)
        if self.transforms is not None:
            grid = F.affine_grid(self.transforms[index], [len(indices), 1, 28, 28], align_corners=False)
            moved = F.grid_sample(images.unsqueeze(1).float(), grid, align_corners=False)
            images = moved.squeeze(1).round().to(torch.uint8)
        return {"images": images, "labels": self.labels.index_select(0, index)}

    def checksum(self) -> str:
        """Return the SHA-256 of images and labels, which are on the CPU."""
        return hashlib.sha256(self.images.numpy().tobytes() + self.labels.numpy().tobytes()).hexdigest()

    def moved(self, rotation: float, shift: int, seed: list[int]) -> "Digits":
        """Return images rotated by up to `rotation` degrees and shifted by up to `shift` pixels along both axes, drawn
        uniformly from `seed`."""
        random = np.random.default_rng(seed)
        angles = torch.from_numpy(np.radians(random.uniform(-rotation, rotation, len(self)))).float()
        offsets = torch.from_numpy(random.integers(-shift, shift + 1, (len(self), 2, 1)) * (2 / 28)).float()
        cos, sin = angles.cos(), angles.sin()
        turns = torch.stack([torch.stack([cos, -sin], 1), torch.stack([sin, cos], 1)], 1)
        return replace(self, transforms=torch.cat([turns, offsets], 2).to(self.images.device))


def mnist(data_dir: str) -> tuple[Digits, Digits]:
    """Return MNIST's training and test set; torchvision downloads what is not in `data_dir`. Raise a UserError if the
    files can neither be found nor downloaded, or one is not what its name says."""
    folders = [Path(data_dir) / "MNIST" / "raw", Path(data_dir)]
    complete = [folder for folder in folders if all((folder / name).is_file() for name in IDX_FILES)]
    if not complete:
        _download(data_dir)
        complete = folders
    train, evaluation = (_read_digits(complete[0], *IDX_FILES[i : i + 2]) for i in (0, 2))
    return train, evaluation


def bundled_digits() -> tuple[Digits, Digits]:
    """Return the 1,797 digits in scikit-learn, a fixed fifth of them for evaluation, enlarged to look like MNIST's.

    Source: https://archive.ics.uci.edu/dataset/80 (8 x 8 pixels, 17 shades).
    """
    file = distribution("scikit-learn").locate_file("sklearn/datasets/data/digits.csv.gz")
    rows = np.loadtxt(str(file), delimiter=",")  # load_digits takes a second to import
    images, labels = rows[:, :-1], rows[:, -1]
    order = np.random.default_rng(0).permutation(len(labels))
    small = torch.from_numpy(images[order]).view(-1, 1, 8, 8) * (255 / 16)
    large = F.pad(F.interpolate(small, size=20, mode="bilinear"), (4,) * 4)  # MNIST's digits fill 20 x 20 of 28 x 28
    data = large.squeeze(1).round().to(torch.uint8), torch.from_numpy(labels[order]).long()
    split = len(labels) // 5
    return Digits(data[0][split:], data[1][split:]), Digits(data[0][:split], data[1][:split])


def read_pictures(files: list[str]) -> Digits:
    """Return pictures of digits as MNIST has them, light on black, whatever their size and colours; all labels
    are 0. Raise a UserError if a file is not a picture."""
    images = []
    for file in files:
        with explained(f"{file}: cannot be read as a picture, ", OSError), Image.open(file) as picture:
            paper = Image.new("RGBA", picture.size, "white")  # where the picture is transparent
            grey = Image.alpha_composite(paper, picture.convert("RGBA")).convert("L")
        pixels = np.asarray(grey)
        border = np.concatenate([pixels[0], pixels[-1], pixels[:, 0], pixels[:, -1]])
        grey = ImageOps.invert(grey) if np.median(border) > 127 else grey
        images.append(torch.from_numpy(np.array(ImageOps.pad(grey, (28, 28)))))
    return Digits(torch.stack(images), torch.zeros(len(files), dtype=torch.int64))


def _download(data_dir: str) -> None:
    from torchvision.datasets.mnist import MNIST  # takes more than a second, and is needed only once

    try:
        with contextlib.redirect_stdout(io.StringIO()):  # it prints every mirror that it gives up on
            MNIST(data_dir, download=True)
    except (RuntimeError, OSError) as error:
        says = str(error).strip().splitlines()[-1]
        raise UserError(
            f"MNIST is not in task.data_dir={data_dir} and could not be downloaded ({says}): set --task.data_dir=DIR "
            f"to a folder with the four files {', '.join(IDX_FILES)}, or use the bundled digits: --task.source=digits"
        ) from error


def _read_digits(folder: Path, images_name: str, labels_name: str) -> Digits:
    hint = "to download MNIST again, or set --task.data_dir"
    tensors = []
    for path, dimensions in ((folder / images_name, 3), (folder / labels_name, 1)):
        content = np.fromfile(path, np.uint8)
        try:
            tensors.append(_from_idx(content, dimensions))
        except ValueError as error:
            says = f"truncated or not an IDX file of {path.name.split('-')[1]} ({len(content)} bytes)"
            raise UserError(f"{path}: {says}; delete it {hint}") from error
    images, labels = tensors
    if images.shape[1:] != (28, 28) or len(labels) != len(images) or len(labels) == 0 or labels.max() > 9:
        shapes = f"images {tuple(images.shape)}, labels {tuple(labels.shape)}"
        raise UserError(f"{folder / images_name} and {labels_name} are not MNIST's: {shapes}; delete both {hint}")
    return Digits(images, labels.long())


def _from_idx(content: np.ndarray, dimensions: int) -> Tensor:
    """Return the array of bytes that an IDX file holds, after two zeros, the type (8: unsigned bytes), the number of
    dimensions, and the size of each as a big-endian int32 (http://yann.lecun.com/exdb/mnist). Raise a ValueError if it
    is not such a file."""
    data = 4 + 4 * dimensions
    if bytes(content[:4]) != bytes([0, 0, 8, dimensions]):
        raise ValueError("another kind of file")
    shape = content[4:data].view(">i4")
    return torch.from_numpy(content[data:].reshape(shape))
