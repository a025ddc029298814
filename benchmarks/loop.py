"""The loop itself: a step of train.py against the same step by hand in plain PyTorch, on one process.

    python -m benchmarks.loop [--data_dir=DIR]

Two models, since what a loop costs is a time and not a share: the MNIST CNN, and an MLP whose forward, backward and
update take 0.15 ms together. By hand it is the shortest loop that does the same: the same images in batches of 64 by
index, fp32, cross entropy, the gradients' norm (clip_grad_norm_, and no update where it is not finite), fused AdamW, a
one-cycle schedule, the loss summed up. Ours is timed by what it records of itself, evaluation apart; it counts what
the loss counts besides, looks for a request to stop, and writes a record every 50 steps. Both sides end at the same
loss, within 10%: their shuffling differs.

Where ours spends what a step of the MLP takes: half in the forward and backward pass and the update, a fifth in
torch.optim around it, a tenth each in fetching the batch and in the norm, 3% in accelerator.backward. What is not in
it: Accelerate's optimizer wrapper (docs/upstream.md), a DataLoader without workers, and sums on the device.
"""

import contextlib
import io
import json
import math
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Literal

import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.optim.lr_scheduler import OneCycleLR

from benchmarks import pairs
from benchmarks.pairs import Comparison, in_turn
from src.config import Config, load_config
from src.data.mnist import Digits, mnist
from src.mkl import avoid_mkl
from src.models.mnist_cnn import MnistCnn
from src.tasks import TASKS
from src.tasks.mnist import Mnist
from train import train

BATCH = 64


class Mlp(Mnist):
    """Its data are vectors, and as easily learnt."""

    name: Literal["mlp"] = "mlp"  # type: ignore[assignment]
    """The task to train."""

    def build_model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 10))

    def build_datasets(self) -> tuple[Digits, Digits]:
        torch.manual_seed(1)
        vectors = torch.randn(200 * BATCH, 32)
        examples = Digits(vectors, (vectors @ torch.randn(32, 10)).argmax(1))
        return examples, Digits(*examples.__getitems__(list(range(BATCH))).values())


TASKS["mlp"] = Mlp


def ours(config: Config) -> tuple[float, float]:
    """Returns: seconds per step, and the mean loss of the last 50."""
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()):
        train(config.model_copy(update={"output_dir": f"{folder}/run"}))
        summary = json.loads((Path(folder) / "run" / "summary.json").read_text())
    return BATCH / summary["samples_per_second"], summary["train/loss"]


def by_hand(config: Config, model: nn.Module, examples: Digits) -> tuple[float, float]:
    """Returns: the same."""
    steps = config.max_steps or 0
    avoid_mkl(model, "cpu", "fp32")  # as train.py does: the question is the loop
    optimizer = torch.optim.AdamW(model.parameters(), lr=config.optim.lr, fused=True)
    scheduler = OneCycleLR(optimizer, config.optim.lr, total_steps=config.steps(len(examples) // BATCH)[1])
    model.train()
    losses: list[float] = []
    started = time.perf_counter()
    while len(losses) < steps:
        for index in torch.randperm(len(examples)).split(BATCH):
            loss = cross_entropy(model(examples.images[index]), examples.labels[index])
            loss.backward()
            norm = nn.utils.clip_grad_norm_(model.parameters(), math.inf)
            if math.isfinite(norm):
                optimizer.step()
                scheduler.step()
            optimizer.zero_grad()
            losses.append(loss.item())
            if len(losses) == steps:
                break
    return (time.perf_counter() - started) / steps, sum(losses[-50:]) / 50


def compare(
    question: str, target: float, settings: list[str], model: Callable[[], nn.Module], examples: Digits
) -> Comparison:
    config = load_config([*settings, "--wandb.mode=disabled", "--save_every=100000", "--eval_every=100000"])
    losses: list[tuple[float, float]] = []

    def our_time() -> float:
        seconds, loss = ours(config)
        losses.append((loss, math.nan))
        return 1000 * seconds

    def their_time() -> float:
        seconds, loss = by_hand(config, model(), examples)
        losses[-1] = (losses[-1][0], loss)
        return 1000 * seconds

    our_times, their_times = in_turn(5, our_time, their_time)
    assert all(abs(a / b - 1) < 0.1 for a, b in losses), losses
    return Comparison(question, "ms/step", our_times, their_times, target, is_gain=False)


def measure(data_dir: str) -> list[Comparison]:
    torch.set_num_threads(1)  # the loop is one thread, and more of them wait for each other
    plain = ["--task.rotation=0", "--task.shift=0", "--task.label_smoothing=0", "--task.dropout=0"]
    cnn = [f"--task.data_dir={data_dir}", "--max_steps=100", *plain]
    mlp = ["--task.name=mlp", "--max_steps=4000", "--epochs=20", *plain]
    train_set, _ = mnist(data_dir)
    return [
        compare("loop: MNIST CNN, step", 1.03, cnn, lambda: MnistCnn(dropout=0), train_set),
        compare("loop: MLP of 0.15 ms, step", 1.25, mlp, Mlp().build_model, Mlp().build_datasets()[0]),
    ]


if __name__ == "__main__":
    pairs.main(measure, __doc__)
