"""MNIST by the recipe of pytorch/examples, as a plain loop: a peer that can be shipped.

    python -m benchmarks.mnist_peer DATA_DIR EPOCHS

Written here from the description of that example (https://github.com/pytorch/examples/tree/main/mnist): two
convolutions, 32 and 64 channels of 3 x 3, and two linear layers; Adadelta at a rate of 1, times 0.7 after each epoch;
batches of 64; pixels less 0.1307, by 0.3081. torchvision reads and converts the images one by one, as there.
"""

import sys

import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.optim import Adadelta
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import DataLoader
from torchvision.datasets import MNIST
from torchvision.transforms import Compose, Normalize, ToTensor

BATCH, TEST_BATCH, SAY_EVERY = 64, 1000, 10


def build_model() -> nn.Sequential:
    """Return a model that gives logits of shape (batch, 10) for images of shape (batch, 1, 28, 28), float32."""
    convolutions = [nn.Conv2d(1, 32, 3), nn.ReLU(), nn.Conv2d(32, 64, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Dropout(0.25)]
    head = [nn.Flatten(), nn.Linear(64 * 12 * 12, 128), nn.ReLU(), nn.Dropout(0.5), nn.Linear(128, 10)]
    return nn.Sequential(*convolutions, *head)


def main(data_dir: str, epochs: int) -> None:
    """Train, and print after each epoch how many of the test images are right."""
    torch.manual_seed(1)
    prepare = Compose([ToTensor(), Normalize(0.1307, 0.3081)])
    batches = DataLoader(MNIST(data_dir, train=True, transform=prepare), BATCH, shuffle=True)
    test_batches = DataLoader(MNIST(data_dir, train=False, transform=prepare), TEST_BATCH)
    model = build_model()
    optimizer = Adadelta(model.parameters(), lr=1.0)
    schedule = StepLR(optimizer, step_size=1, gamma=0.7)
    for _ in range(epochs):
        model.train()
        for step, (images, labels) in enumerate(batches, start=1):
            loss = cross_entropy(model(images), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if step % SAY_EVERY == 0:
                print(f"step {step:>4}/{len(batches)}  loss {loss.item():.4f}")
        schedule.step()
        model.eval()
        with torch.no_grad():
            right = sum(int((model(images).argmax(1) == labels).sum()) for images, labels in test_batches)
        print(f"right: {right}/{len(test_batches.dataset)}")  # type: ignore[arg-type]


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
