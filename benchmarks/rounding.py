"""How far plain PyTorch drifts from itself in 50 steps, only because it sums a batch of 64 as two of 32.

    python -m benchmarks.rounding [--data_dir=DIR]

One process, no code of ours but the CNN: this is what no strategy can undercut. Rounding differs by 1e-7; how training
magnifies it depends on the learning rate. Printed: the largest relative difference of the training loss, per seed.
"""

from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.optim import SGD, Adadelta, AdamW, Optimizer

from benchmarks import pairs
from src.tasks.mnist import Digits, MnistCnn, mnist

SEEDS, STEPS = 5, 50
RECIPES: dict[str, Callable[[nn.Module], Optimizer]] = {
    "AdamW, 8e-5 (configs/mnist.yaml in its first steps)": lambda model: AdamW(model.parameters(), lr=8e-5),
    "AdamW, 3e-3 from the first step": lambda model: AdamW(model.parameters(), lr=3e-3),
    "SGD, 0.02, momentum 0.9": lambda model: SGD(model.parameters(), lr=0.02, momentum=0.9),
    "Adadelta, 1.0 (configs/mnist_reference.yaml)": lambda model: Adadelta(model.parameters(), lr=1.0),
}


def losses(train_set: Digits, recipe: Callable[[nn.Module], Optimizer], seed: int, parts: int) -> list[float]:
    """Return those of STEPS steps, each batch of 64 passed through the model in `parts`."""
    torch.manual_seed(seed)
    model = MnistCnn(dropout=0)
    optimizer = recipe(model)
    sums = [0.0] * STEPS
    for step, window in enumerate(torch.randperm(len(train_set))[: 64 * STEPS].split(64)):
        for part in window.split(64 // parts):
            batch = train_set.__getitems__(part.tolist())
            loss = cross_entropy(model(batch["images"]), batch["labels"], reduction="sum") / 64
            loss.backward()
            sums[step] += loss.item()
        optimizer.step()
        optimizer.zero_grad()
    return sums


def measure(data_dir: Path, _: Path) -> list[pairs.Comparison]:
    train_set = mnist(str(data_dir))[0]
    for name, recipe in RECIPES.items():
        drifts = [pairs.drift(*(losses(train_set, recipe, seed, parts) for parts in (2, 1))) for seed in range(SEEDS)]
        print(f"{name:<52}", *(f"{drift:.0e}" for drift in sorted(drifts)), flush=True)
    return []


if __name__ == "__main__":
    pairs.main(measure, __doc__)
