"""Evaluation on two processes: train.py's, against gathering each batch.

    python -m benchmarks.evaluation [--data_dir=DIR]

MNIST's 10,000 test images, on gloo, one thread each, batches of 64, fp32. Theirs is the loop of Accelerate's examples:
`.item()` of the loss, `gather_for_metrics` of predictions and labels and `add_batch` of the metric in each batch. Ours
is `evaluate` of train.py: one reduce, one gather and the same metric at the end, and, unlike theirs, a loss that counts
no example twice. Both give the same number of correct answers, asserted. Two models: the CNN, whose forward pass takes
most of the time on a CPU, and a linear one, which shows the loops themselves, as a GPU would.
"""

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader

from benchmarks import pairs
from benchmarks.pairs import Comparison, in_turn
from benchmarks.runs import Side, arguments, launch
from src.distributed.accelerator import prepare
from src.distributed.cpu import tune_for_cpu
from src.distributed.stop import StopSignal
from src.tasks.metrics import Accuracy
from src.tasks.mnist import MnistCnn, mnist
from train import build, evaluate, run_settings

ROUNDS, TESTED = 9, 10_000


class Linear(nn.Linear):
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return super().forward(input.flatten(1).float() / 255)


def measure_in_process(data_dir: str) -> None:
    """Measure as one of the two; the first writes its times."""
    config = run_settings(arguments({"task.data_dir": data_dir, "global_batch_size": 128}))
    run = build(config)
    assert run
    accelerator = run.accelerator
    test_set: Any = mnist(data_dir)[1]  # as a user's loader would read them: in batches
    stop = StopSignal(accelerator, config)

    def seconds(count: Callable[[], int], counts: set[int]) -> float:
        accelerator.wait_for_everyone()
        started = time.perf_counter()
        counts.add(count())
        return time.perf_counter() - started

    def compare(model: nn.Module) -> list[list[float]]:
        tune_for_cpu(model)  # as train.py does; it speeds up both sides
        model = run.model = prepare(accelerator, model)
        loader = accelerator.prepare(DataLoader(test_set, batch_size=64, collate_fn=config.task.collate))
        counts: set[int] = set()

        def ours() -> int:
            evaluation = evaluate(run, stop)
            assert evaluation
            return round(evaluation.metrics["eval/accuracy"] * TESTED)

        def theirs() -> int:
            model.eval()
            loss_sum, metric = 0.0, Accuracy()
            for batch in loader:
                with torch.no_grad():
                    logits = model(batch["images"])
                loss_sum += cross_entropy(logits, batch["labels"]).item()
                predictions, references = accelerator.gather_for_metrics((logits.argmax(1), batch["labels"]))
                metric.add_batch(predictions=predictions, references=references)
            model.train()
            return round(metric.compute()["accuracy"] * TESTED)

        ours()  # imports `evaluate`
        found = in_turn(ROUNDS, lambda: seconds(ours, counts), lambda: seconds(theirs, counts))
        assert len(counts) == 1, f"other counts: {counts}"
        return found

    torch.manual_seed(0)
    found = [compare(Linear(784, 10)), compare(MnistCnn())]
    if accelerator.is_main_process:
        Path("found.json").write_text(json.dumps(found))
    accelerator.wait_for_everyone()
    accelerator.end_training()


def measure(data_dir: Path, folder: Path) -> list[Comparison]:
    Side([*launch("ddp", 2), "-m", "benchmarks.evaluation", "--process", str(data_dir)], folder).run()
    (linear, their_linear), (cnn, their_cnn) = json.loads((folder / "found.json").read_text())
    return [
        Comparison("evaluation x2: the loop (linear model)", "s", linear, their_linear, 5, is_gain=True),
        Comparison("evaluation x2: with the CNN's forward pass", "s", cnn, their_cnn, 1, is_gain=True),
    ]


if __name__ == "__main__":
    if sys.argv[1:2] == ["--process"]:
        measure_in_process(sys.argv[2])
    else:
        pairs.main(measure, pairs.parser(__doc__))
