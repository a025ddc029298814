"""How far plain PyTorch drifts from itself in 50 steps, only because it sums a batch of 64 as two of 32.

    python -m benchmarks.rounding --data_dir=DIR

One process, no code of ours but the CNN: this is what no strategy can undercut. Rounding differs by 1e-7; how training
magnifies it depends on the learning rate. Printed: the largest relative difference of the training loss, per seed.
"""

import argparse
from collections.abc import Callable

import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.optim import SGD, Adadelta, AdamW, Optimizer

from src.data.mnist import Digits, mnist
from src.models.mnist_cnn import MnistCnn

SEEDS, STEPS = 5, 50
RECIPES: dict[str, Callable[[nn.Module], Optimizer]] = {
    "AdamW, 8e-5 (configs/mnist.yaml in its first steps)": lambda model: AdamW(model.parameters(), lr=8e-5),
    "AdamW, 3e-3 from the first step": lambda model: AdamW(model.parameters(), lr=3e-3),
    "SGD, 0.02, momentum 0.9": lambda model: SGD(model.parameters(), lr=0.02, momentum=0.9),
    "Adadelta, 1.0 (configs/mnist_reference.yaml)": lambda model: Adadelta(model.parameters(), lr=1.0),
}


def losses(train_set: Digits, recipe: Callable[[nn.Module], Optimizer], seed: int, parts: int) -> torch.Tensor:
    """The losses of STEPS steps, each batch of 64 passed through the model in `parts`; shape (STEPS,), float64."""
    torch.manual_seed(seed)
    model = MnistCnn(dropout=0)
    optimizer = recipe(model)
    sums = torch.zeros(STEPS, dtype=torch.float64)
    for step, window in enumerate(torch.randperm(len(train_set))[: 64 * STEPS].split(64)):
        for part in window.split(64 // parts):
            batch = train_set.__getitems__(part.tolist())
            loss = cross_entropy(model(batch["images"]), batch["labels"], reduction="sum") / 64
            loss.backward()
            sums[step] += loss.detach()
        optimizer.step()
        optimizer.zero_grad()
    return sums


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data_dir", default="data")
    train_set, _ = mnist(parser.parse_args().data_dir)
    for name, recipe in RECIPES.items():
        drifts = []
        for seed in range(SEEDS):
            whole, halves = (losses(train_set, recipe, seed, parts) for parts in (1, 2))
            drifts.append(((whole - halves).abs() / whole).max().item())
        print(f"{name:<52}", *(f"{drift:.0e}" for drift in sorted(drifts)), flush=True)


if __name__ == "__main__":
    main()
