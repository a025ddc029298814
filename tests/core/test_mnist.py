"""The MNIST task: the CNN of pytorch/examples, scikit-learn's digits, damaged files, and dropout on a CPU."""

from pathlib import Path

import numpy as np
import pytest
import torch
from sklearn.datasets import load_digits
from torch import Tensor
from torch.nn import functional as F
from torchvision import datasets

from src.config.errors import UserError
from src.distributed.cpu import Dropout
from src.tasks.mnist import MnistCnn, bundled_digits, mnist

IDX_FILES = ("train-images-idx3-ubyte", "train-labels-idx1-ubyte", "t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte")


def reference_forward(model: MnistCnn, images: Tensor) -> Tensor:
    """As written in pytorch/examples/mnist/main.py, without dropout."""
    x = (images.unsqueeze(1) / 255 - 0.1307) / 0.3081
    x = F.relu(model.conv2(F.relu(model.conv1(x))))
    x = torch.flatten(F.max_pool2d(x, 2), 1)
    return model.fc2(F.relu(model.fc1(x)))


def test_the_cnn_is_that_of_pytorchs_examples_in_fp32_and_bf16() -> None:
    model = MnistCnn().eval()
    assert sum(p.numel() for p in model.parameters()) == 1_199_882
    images = torch.randint(0, 256, (64, 28, 28), dtype=torch.uint8)
    exact = reference_forward(model, images)
    torch.testing.assert_close(model(images), exact)
    with torch.autocast("cpu", torch.bfloat16):
        ours, plain = model(images), reference_forward(model, images)
    assert ours.dtype == torch.bfloat16
    assert (ours - exact).norm() < 1.2 * (plain - exact).norm()


def test_the_bundled_digits_are_scikit_learns() -> None:
    train, evaluation = bundled_digits()
    images, labels = load_digits(return_X_y=True)
    order = np.random.default_rng(0).permutation(len(labels))
    assert torch.cat([evaluation.labels, train.labels]).tolist() == labels[order].tolist()
    center = torch.cat([evaluation.images, train.images])[:, 4:24, 4:24].double().mean((1, 2))
    assert np.corrcoef(center, images[order].mean(1))[0, 1] > 0.999  # enlarged
    assert (train.images.shape, train.images.max()) == ((1438, 28, 28), 255)


def test_damaged_files_of_mnist_are_refused_in_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Truncated, text or swapped, where they cannot be downloaded again."""
    monkeypatch.setattr(datasets.MNIST, "mirrors", ["http://127.0.0.1:9/"])
    (folder := tmp_path / "MNIST/raw").mkdir(parents=True)
    images = bytes([0, 0, 8, 3, 0, 0, 0, 5, 0, 0, 0, 28, 0, 0, 0, 28]) + bytes(5 * 28 * 28)
    contents = [images, bytes([0, 0, 8, 1, 0, 0, 0, 5, *range(5)])] * 2
    for name, content in zip(IDX_FILES, contents, strict=True):
        (folder / name).write_bytes(content)
    train, evaluation = mnist(str(tmp_path))
    assert train.images.shape == evaluation.images.shape == (5, 28, 28)
    assert train.labels.tolist() == [0, 1, 2, 3, 4]
    for number, name in enumerate(IDX_FILES):
        for damaged in (contents[number][:-1], b"<html>", contents[number ^ 1]):
            (folder / name).write_bytes(damaged)
            with pytest.raises(
                UserError, match=f"^MNIST could be neither read from {folder} nor downloaded .*--task.source=digits"
            ):
                mnist(str(tmp_path))
        (folder / name).write_bytes(contents[number])


@pytest.mark.parametrize(("p", "dtype"), [(0.25, torch.float32), (0.3, torch.bfloat16)])  # multiples of 1/256, and not
def test_dropout_on_a_cpu_has_the_distribution_of_torchs(p: float, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    ones = torch.ones(1001, dtype=dtype, requires_grad=True)
    dropout = Dropout(p)
    outputs = [dropout(ones) for _ in range(400)]
    sent = torch.stack(outputs).detach().double()
    assert set(sent.unique().tolist()) == {0.0, torch.tensor(1 / (1 - p), dtype=dtype).item()}
    kept = (sent != 0).double()
    sigma = (p * (1 - p)) ** 0.5
    assert abs(kept.mean() - (1 - p)) < 4 * sigma / kept.numel() ** 0.5
    for along in (0, 1):  # a unit is not dropped more often than another, nor more of them in one draw
        variance = kept.mean(along).var() * kept.shape[along] / sigma**2
        assert abs(variance - 1) < 5 * (2 / kept.shape[1 - along]) ** 0.5
    for offset in (1, 4, 8):  # neighbours share words of random bits, but no bits
        pairs = torch.cov(torch.stack([kept[:, :-offset].flatten(), kept[:, offset:].flatten()]))[0, 1]
        assert abs(pairs) < 4 * sigma**2 / kept.numel() ** 0.5
    (gradient,) = torch.autograd.grad(outputs[0].sum(), ones)
    assert torch.equal(gradient, outputs[0].detach())
    assert torch.equal(dropout.eval()(ones), ones)
