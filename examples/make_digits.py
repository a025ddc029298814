"""Make the data of image_classification.py: `python -m examples.make_digits` writes data/digits_png, and
`python -m examples.make_digits 5` data/digits_5_png, with only five of each digit to train on."""

from argparse import ArgumentParser
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from sklearn.datasets import load_digits
from torch.nn import functional as F


def write(folder: Path, most: int = 1797) -> None:
    """Write scikit-learn's 1,797 digits, enlarged from 8 x 8 to 28 x 28 pixels with a margin of 4, as
    train/<digit>/*.png and val/<digit>/*.png. A fifth is to evaluate on; of each digit, at most so many to train on."""
    images, labels = load_digits(return_X_y=True)
    order = np.random.default_rng(0).permutation(len(labels))
    small = torch.from_numpy(images[order]).view(-1, 1, 8, 8) * (255 / 16)
    large = F.pad(F.interpolate(small, size=20, mode="bilinear"), (4,) * 4)[:, 0].round().to(torch.uint8)
    for i, (image, label) in enumerate(zip(large.numpy(), labels[order], strict=True)):
        first_to_train_on = len(order) // 5
        part, number = ("val", i) if i < first_to_train_on else ("train", i - first_to_train_on)
        file = folder / part / str(label) / f"{number:04}.png"
        file.parent.mkdir(parents=True, exist_ok=True)
        if part == "train" and len([*file.parent.iterdir()]) == most:
            continue
        Image.fromarray(image).save(file)


if __name__ == "__main__":
    parser = ArgumentParser("python -m examples.make_digits", description="Write data/digits_png, to train on.")
    parser.add_argument("most", type=int, nargs="?", help="so many of each digit at most, into data/digits_<most>_png")
    if most := parser.parse_args().most:
        write(Path(f"data/digits_{most}_png"), most)
    else:
        write(Path("data/digits_png"))
