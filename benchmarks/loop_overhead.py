"""What the loop and the data path cost against plain PyTorch, one process: two ratios, each measured in one run.

    make bench ARGS=--data_dir=DIR      (DIR holds MNIST; where it doesn't, MNIST is downloaded into it)

Both sides of a ratio run in turn, several times; the medians and their spread are printed. What equal work means:
- loop: the same CNN, AdamW, one-cycle schedule, loader, images and batches of 64; by hand it is the shortest loop that
  trains them right. Ours adds exact weighting, the summed loss, the gradient norm and the record every 50 steps.
- data: one shuffled epoch of 60,000 normalised images in batches of 64.
Neither side augments.
"""

import argparse
import contextlib
import io
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
from accelerate import Accelerator
from torch.nn.functional import cross_entropy
from torch.optim.lr_scheduler import OneCycleLR
from torch.utils.data import BatchSampler, DataLoader, RandomSampler
from torchvision import datasets, transforms

from src.batches import training_windows
from src.config import Config, load_config
from src.data.mnist import mnist
from src.models.mnist_cnn import MnistCnn
from src.tasks.mnist import Mnist
from train import train

STEPS = 300


def task(config: Config) -> Mnist:
    assert isinstance(config.task, Mnist)
    return config.task


def loop_ours(config: Config) -> float:
    """Seconds per step of train.py, evaluation apart, as it reports itself."""
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()):
        train(config.model_copy(update={"output_dir": folder}))
        summary = json.loads((Path(folder) / "summary.json").read_text())
    return config.global_batch_size / summary["samples_per_second"]


def loop_by_hand(config: Config) -> float:
    """Seconds per step of the same training in plain PyTorch."""
    torch.manual_seed(0)
    train_set, _ = mnist(task(config).data_dir)
    model = MnistCnn()
    optimizer = torch.optim.AdamW(model.parameters(), lr=config.optim.lr, fused=True)
    scheduler = OneCycleLR(optimizer, config.optim.lr, total_steps=9380)
    order = BatchSampler(RandomSampler(range(len(train_set))), 64, drop_last=False)
    loader: DataLoader[dict[str, torch.Tensor]] = DataLoader(
        train_set,  # type: ignore[arg-type]
        batch_sampler=order,
        collate_fn=lambda batch: batch,
    )
    model.train()
    loss_sum = 0.0
    started = time.perf_counter()
    for step, batch in enumerate(loader, start=1):
        loss = cross_entropy(model(batch["images"]), batch["labels"])
        loss.backward()
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        loss_sum += loss.item()
        if step == STEPS:
            break
    return (time.perf_counter() - started) / STEPS


def data_ours(config: Config) -> float:
    """Seconds per epoch of normalised batches."""
    train_set, _ = mnist(task(config).data_dir)
    started = time.perf_counter()
    for (micro_batch,) in training_windows(Accelerator(cpu=True), config, train_set, 0, total_steps=938):
        _ = ((micro_batch.data["images"].unsqueeze(1).float() / 255) - 0.1307) / 0.3081
    return time.perf_counter() - started


def data_torchvision(config: Config) -> float:
    """Seconds per epoch of normalised batches, as in pytorch/examples/mnist."""
    transform = transforms.Compose([transforms.ToTensor(), transforms.Normalize((0.1307,), (0.3081,))])
    dataset = datasets.MNIST(task(config).data_dir, train=True, transform=transform)
    started = time.perf_counter()
    for _ in DataLoader(dataset, batch_size=64, shuffle=True):
        pass
    return time.perf_counter() - started


def compare(name: str, unit: str, rounds: int, ours: Callable[[], float], theirs: Callable[[], float]) -> None:
    pairs = [(ours(), theirs()) for _ in range(rounds)]
    for who, seconds in zip(("ours", "theirs"), zip(*pairs, strict=True), strict=True):
        low, median, high = (1e3 * f(seconds) for f in (min, statistics.median, max))
        print(f"{name}  {who:<6}  {median:8.2f} ms per {unit}  ({low:.2f} to {high:.2f})")
    ratios = sorted(a / b for a, b in pairs)
    low, median, high = ratios[0], statistics.median(ratios), ratios[-1]
    print(f"{name}  ours / theirs {median:.3f}  ({low:.3f} to {high:.3f}): {1 / median:.1f} times as fast\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data_dir", default="data")
    parser.add_argument("--rounds", type=int, default=7)
    arguments = parser.parse_args()
    settings = [f"--task.data_dir={arguments.data_dir}", f"--max_steps={STEPS}", "--wandb.mode=disabled"]
    settings += ["--task.rotation=0", "--task.shift=0", "--task.label_smoothing=0"]
    config = load_config([*settings, "--output_dir=/tmp/unused"])
    mnist(arguments.data_dir)
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads\n")
    compare("loop", "step", arguments.rounds, lambda: loop_ours(config), lambda: loop_by_hand(config))
    compare("data", "epoch", 3, lambda: data_ours(config), lambda: data_torchvision(config))


if __name__ == "__main__":
    main()
