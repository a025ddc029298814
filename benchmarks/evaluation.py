"""Evaluation: train.py's against the loops that one would write, of MNIST's 10,000 test images.

    python -m benchmarks.evaluation [--data_dir=DIR]

Ours is `evaluate` of train.py, with all that it takes until the metrics are there; theirs evaluates the same weights on
the same examples in the same precision, in batches as large as in training. One thread per process.

One process: plain PyTorch, which sums loss and right answers on the way, in batches of 64, with the CNN as
pytorch/examples writes it (mnist_peer.py). Two processes, on gloo, 32 images each: the loop of Accelerate's examples:
`.item()` of the loss, `gather_for_metrics` of predictions and labels and `add_batch` of the metric in each batch. Ours
is one reduce, one gather and the same metric at the end, and, unlike theirs, a loss that counts no example twice. With
a linear model too, which shows the loops themselves, as a GPU would.

Asserted: as many right answers, within 0.1% of the examples (bf16: 0.5%). bf16 is left out where the CPU has none.
"""

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import Tensor, autocast, nn, no_grad
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader

from benchmarks import mnist_peer, pairs
from benchmarks.pairs import Comparison, in_turn
from benchmarks.runs import Side, arguments, has_bf16, launch, own
from src.distributed.accelerator import prepare
from src.distributed.stop import StopSignal
from src.tasks.metrics import Accuracy
from src.training.run import Run
from train import build, evaluate, run_settings

ROUNDS = 9
Count = Callable[[], float]
"""Evaluates, and returns the fraction of right answers."""


class Plain(nn.Module):
    """A model for images of shape (batch, 28, 28), uint8."""

    def __init__(self, layers: nn.Sequential) -> None:
        super().__init__()
        self.layers = layers

    def forward(self, images: Tensor) -> Tensor:
        return self.layers((images.unsqueeze(1).float() / 255 - 0.1307) / 0.3081)


def plain_images(run: Run, model: nn.Module) -> float:
    """Evaluate as one would without any library."""
    model.eval()
    loss_sum, right = 0.0, 0
    task: Any = run.task
    for batch in DataLoader(run.eval_set, run.config.global_batch_size, collate_fn=task.collate):  # type: ignore[arg-type]
        with no_grad(), autocast("cpu", enabled=run.launch.precision == "bf16"):
            logits = model(batch["images"])
        loss_sum += cross_entropy(logits.float(), batch["labels"], reduction="sum").item()
        right += int((logits.argmax(1) == batch["labels"]).sum())
    return right / len(run.eval_set)


def gathered_images(run: Run, model: nn.Module, loader: Any) -> float:
    """Evaluate as Accelerate's examples do."""
    model.eval()
    loss_sum, metric = 0.0, Accuracy()
    for batch in loader:
        with no_grad():
            logits = model(batch["images"])
        loss_sum += cross_entropy(logits, batch["labels"]).item()
        predictions, references = run.accelerator.gather_for_metrics((logits.argmax(1), batch["labels"]))
        metric.add_batch(predictions=predictions, references=references)
    return metric.compute()["accuracy"] if run.is_main else 0.0


def compare(run: Run, stop: StopSignal, theirs: Count) -> list[list[float]]:
    """Return the seconds of each round, ours and theirs."""

    def ours() -> float:
        evaluation = evaluate(run, stop)
        assert evaluation
        return evaluation.metrics["eval/accuracy"]

    def seconds(count: Count, found: list[float]) -> float:
        run.accelerator.wait_for_everyone()
        started = time.perf_counter()
        found.append(count())
        return time.perf_counter() - started

    ours(), theirs()  # imports `evaluate`
    answers: list[list[float]] = [[], []]
    times = in_turn(ROUNDS, lambda: seconds(ours, answers[0]), lambda: seconds(theirs, answers[1]))
    within = 0.005 if run.launch.precision == "bf16" else 0.001
    assert not run.is_main or abs(answers[0][0] - answers[1][0]) <= within, f"other answers: {answers}"
    return times


def measure_in_process(words: list[str]) -> None:
    """Measure as one of the processes; the first writes its times."""
    run: Any = build(run_settings(words))
    stop = StopSignal(run.accelerator, run.config)
    plain, weights = Plain(mnist_peer.build_model()), run.accelerator.unwrap_model(run.model).state_dict().values()
    plain.load_state_dict(dict(zip(plain.state_dict(), weights, strict=True)))
    if run.world_size == 1:
        found = [compare(run, stop, lambda: plain_images(run, plain))]
    else:
        batch = run.config.global_batch_size // run.world_size
        loader = run.accelerator.prepare(DataLoader(run.eval_set, batch, collate_fn=run.task.collate))
        net = prepare(run.accelerator, plain)
        found = [compare(run, stop, lambda: gathered_images(run, net, loader))]
        linear = run.model = prepare(run.accelerator, Plain(nn.Sequential(nn.Flatten(), nn.Linear(784, 10))))
        found.append(compare(run, stop, lambda: gathered_images(run, linear, loader)))
    if run.is_main:
        Path("found.json").write_text(json.dumps(found))
    run.accelerator.wait_for_everyone()
    run.accelerator.end_training()


def measure(data_dir: Path, folder: Path) -> list[Comparison]:
    words = own("evaluation", "process", *arguments({"task.data_dir": data_dir, "global_batch_size": 64}))[1:]
    shared = {"evaluation x2: MNIST CNN, Accelerate's loop": 1.2, "evaluation x2: a linear model": 5}
    cases = {
        "fp32": (launch("cpu", 1, "fp32"), {"evaluation: MNIST CNN, fp32, plain loop": 1.2}),
        "bf16": (launch("cpu", 1, "bf16"), {"evaluation: MNIST CNN, bf16, plain loop": 1.2}),
        "x2": (launch("ddp", 2, "fp32"), shared),
    }
    rows = []
    for name, (command, questions) in cases.items():
        if name != "bf16" or has_bf16():
            side = Side([*command, *words], folder / name).run()
            found = json.loads((side.folder / "found.json").read_text())
            for (question, target), times in zip(questions.items(), found, strict=True):
                rows.append(Comparison(question, "s", times[0], times[1], target, is_gain=True))
    return rows


if __name__ == "__main__":
    pairs.main(measure, __doc__, {"process": measure_in_process})
