"""The loop itself: a step of train.py against the same step by hand in plain PyTorch, on one process.

    python -m benchmarks.loop [--data_dir=DIR]

Two models, since what a loop costs is a time and not a share: the MNIST CNN, and an MLP whose forward, backward and
update take 0.15 ms together. By hand it is the shortest loop that does the same: the same images in batches of 64 by
index, fp32, cross entropy, the gradients' norm (clip_grad_norm_, and no update where it is non-finite), fused AdamW, a
one-cycle schedule, the mean loss printed every 50 steps. They take turns of 100 or 4,000 steps. Asserted: the same mean
loss over the first turn, within 10%, as their shuffling differs.
"""

import math
import statistics
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.optim.lr_scheduler import OneCycleLR

from benchmarks import pairs
from benchmarks.pairs import Comparison, drift
from benchmarks.runs import CNN, Side, arguments, ms_per_step, own, take_turns
from src.tasks import TASKS
from src.tasks.mnist import Digits, Mnist
from src.training.run import new_model
from train import main, run_settings

BATCH, LOG_EVERY, ROUNDS = 64, 50, 5
MLP_EXAMPLES = 200 * BATCH
SETTINGS = CNN | {"task.label_smoothing": 0, "task.dropout": 0, "global_batch_size": BATCH, "log_every": LOG_EVERY}


TASKS["mlp"] = "benchmarks.loop:Mlp"


class Mlp(Mnist):
    """Its data are vectors, and as easily learnt."""

    name: Literal["mlp"] = "mlp"  # type: ignore[assignment]
    """The task to train."""
    examples: int = MLP_EXAMPLES
    """How many vectors to train on."""

    def build_model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 10))

    def build_datasets(self) -> tuple[Digits, Digits]:
        torch.manual_seed(1)
        vectors = torch.randn(self.examples, 32)
        examples = Digits(vectors, (vectors @ torch.randn(32, 10)).argmax(1))
        return examples, Digits(*examples.__getitems__(list(range(BATCH))).values())

    def tables(self, outputs: Any, dataset: Any) -> Any:
        return {}  # a vector is no picture


def by_hand(words: list[str]) -> None:
    """Train, and print the mean loss of each 50 steps."""
    config = run_settings(words)
    examples: Any = config.task.build_datasets()[0]
    model = new_model(config)[0]  # as train.py has it: the question is the loop
    optimizer = torch.optim.AdamW(model.parameters(), lr=config.optim.lr, fused=True)
    scheduler = OneCycleLR(optimizer, config.optim.lr, total_steps=config.schedule_steps(len(examples)))
    model.train()
    losses: list[float] = []
    while len(losses) < (config.max_steps or 0):
        for index in torch.randperm(len(examples)).split(BATCH):
            loss = cross_entropy(model(examples.images[index]), examples.labels[index])
            loss.backward()
            norm = nn.utils.clip_grad_norm_(model.parameters(), math.inf)
            if math.isfinite(norm):
                optimizer.step()
                scheduler.step()
            optimizer.zero_grad()
            losses.append(loss.item())
            if len(losses) % LOG_EVERY == 0:
                print(f"loss {statistics.mean(losses[-LOG_EVERY:])}", flush=True)
            if len(losses) == config.max_steps:
                break


def compare(question: str, target: float, steps: int, settings: dict[str, Any], folder: Path) -> Comparison:
    words = arguments(SETTINGS | settings | {"max_steps": (1 + ROUNDS) * steps})
    every = steps // LOG_EVERY
    ours = Side(own("loop", "train", *words), folder / "ours", every=every)
    theirs = Side(own("loop", "by_hand", *words), folder / "theirs", every=every, ends=r"^loss (.*)$", file="log")
    times = [ms_per_step(steps, seconds) for seconds in take_turns(ROUNDS, (ours, theirs))]
    losses = [statistics.mean(side.values[:every]) for side in (ours, theirs)]
    assert drift(losses[:1], losses[1:]) < 0.1, losses
    return Comparison(question, "ms/step", times[0], times[1], target, is_gain=False)


def measure(data_dir: Path, folder: Path) -> list[Comparison]:
    mlp = {"task.name": "mlp", "epochs": (1 + ROUNDS) * 4000 * BATCH // MLP_EXAMPLES}
    return [
        compare("loop: MNIST CNN, step", 1.03, 100, {"task.data_dir": data_dir}, folder / "cnn"),
        compare("loop: MLP of 0.15 ms, step", 1.1, 4000, mlp, folder / "mlp"),
    ]


if __name__ == "__main__":
    pairs.main(measure, __doc__, {"train": lambda _: main(), "by_hand": by_hand})
