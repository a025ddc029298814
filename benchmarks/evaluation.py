"""Evaluation: train.py's against the loops that one would write.

    python -m benchmarks.evaluation [--data_dir=DIR]

Ours is `evaluate` of train.py, with all that it takes until the metrics are there; theirs evaluates the same weights on
the same examples in the same precision, in batches as large as in training. One thread per process.

One process: plain PyTorch, which sums loss and right answers on the way. MNIST's 10,000 test images in batches of 64,
with the CNN as pytorch/examples writes it (mnist_peer.py); and the Llama of configs/pretrain.yaml on a text of 100,000
bytes, in batches of 12 sequences of 64, with transformers' own forward pass and loss.

Two processes, on gloo, 32 images each: the loop of Accelerate's examples: `.item()` of the loss, `gather_for_metrics`
of predictions and labels and `add_batch` of the metric in each batch. Ours is one reduce, one gather and the same
metric at the end, and, unlike theirs, a loss that counts no example twice. With a linear model too, which shows the
loops themselves, as a GPU would.

Asserted: as many right answers, within 0.1% of the examples (bf16: 0.5%). bf16 is left out where the CPU has none.
"""

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader

from benchmarks import mnist_peer, pairs
from benchmarks.language import write_text
from benchmarks.pairs import Comparison, in_turn
from benchmarks.runs import PROJECT, Side, arguments, has_bf16, launch, own
from src.distributed.accelerator import prepare
from src.distributed.stop import StopSignal
from src.tasks.metrics import Accuracy
from src.training.batches import fetch_batch
from src.training.run import Run
from train import build, evaluate, run_settings

ROUNDS = 9
SEQUENCES, LENGTH = 1563, 64
Count = Callable[[], float]
"""Evaluates, and returns the fraction of right answers."""


class Plain(nn.Module):
    """A model for images of shape (batch, 28, 28), uint8, with the weights of one of ours."""

    def __init__(self, ours: nn.Module, layers: nn.Sequential) -> None:
        super().__init__()
        self.layers = layers
        self.load_state_dict(dict(zip(self.state_dict(), ours.state_dict().values(), strict=True)))

    def forward(self, images: Tensor) -> Tensor:
        return self.layers((images.unsqueeze(1).float() / 255 - 0.1307) / 0.3081)


class Linear(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Flatten(), nn.Linear(784, 10))

    def forward(self, images: Tensor) -> Tensor:
        return super().forward((images.float() / 255 - 0.1307) / 0.3081)


def plain_images(run: Run, model: nn.Module) -> float:
    """Evaluate as one would without any library."""
    model.eval()
    loss_sum, right = 0.0, 0
    task: Any = run.task
    for batch in DataLoader(run.eval_set, run.config.global_batch_size, collate_fn=task.collate):  # type: ignore[arg-type]
        with torch.no_grad(), torch.autocast("cpu", enabled=run.launch.precision == "bf16"):
            logits = model(batch["images"])
        loss_sum += cross_entropy(logits.float(), batch["labels"], reduction="sum").item()
        right += int((logits.argmax(1) == batch["labels"]).sum())
    return right / len(run.eval_set)


def gathered_images(run: Run, model: nn.Module, loader: Any) -> float:
    """Evaluate as Accelerate's examples do."""
    model.eval()
    loss_sum, metric = 0.0, Accuracy()
    for batch in loader:
        with torch.no_grad():
            logits = model(batch["images"])
        loss_sum += cross_entropy(logits, batch["labels"]).item()
        predictions, references = run.accelerator.gather_for_metrics((logits.argmax(1), batch["labels"]))
        metric.add_batch(predictions=predictions, references=references)
    return metric.compute()["accuracy"] if run.is_main else 0.0


def plain_tokens(run: Run, model: Any) -> float:
    """Evaluate as one would with transformers."""
    model.eval()
    loss_sum, right, targets = 0.0, 0, 0
    indices = torch.arange(len(run.eval_set)).split(run.config.global_batch_size)
    for part in indices:
        ids = fetch_batch(run.task, run.eval_set, part.tolist())["inputs"]["input_ids"]
        with torch.no_grad():
            output = model(input_ids=ids, labels=ids, use_cache=False)
        number = ids[:, 1:].numel()
        loss_sum += output.loss.item() * number
        right += int((output.logits[:, :-1].argmax(-1) == ids[:, 1:]).sum())
        targets += number
    return right / targets


def measure_in_process(argv: list[str]) -> None:
    """Measure as one of the processes; the first writes its times."""
    run = build(run_settings(argv))
    assert run
    stop = StopSignal(run.accelerator, run.config)

    def compare(theirs: Count) -> list[list[float]]:
        answers: list[list[float]] = [[], []]

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
        sides = [(ours, answers[0]), (theirs, answers[1])]
        found = in_turn(ROUNDS, *(lambda side=side: seconds(*side) for side in sides))
        within = 0.005 if run.launch.precision == "bf16" else 0.001
        assert not run.is_main or abs(answers[0][0] - answers[1][0]) <= within, f"other answers: {answers}"
        return found

    if run.task.name == "causal_lm":
        model: Any = run.accelerator.unwrap_model(run.model)
        plain = type(model.hf)(model.hf.config)  # the head of ours computes in chunks
        plain.load_state_dict(model.hf.state_dict())
        found = [compare(lambda: plain_tokens(run, plain))]
    elif run.world_size == 1:
        peer = Plain(run.model, mnist_peer.build_model())
        found = [compare(lambda: plain_images(run, peer))]
    else:
        task: Any = run.task
        batch = run.config.global_batch_size // run.world_size
        loader = run.accelerator.prepare(DataLoader(run.eval_set, batch, collate_fn=task.collate))  # type: ignore[arg-type]
        net = prepare(run.accelerator, Plain(run.accelerator.unwrap_model(run.model), mnist_peer.build_model()))
        found = [compare(lambda: gathered_images(run, net, loader))]
        linear = run.model = prepare(run.accelerator, Linear())
        found.append(compare(lambda: gathered_images(run, linear, loader)))
    if run.is_main:
        Path("found.json").write_text(json.dumps(found))
    run.accelerator.wait_for_everyone()
    run.accelerator.end_training()


def measure(data_dir: Path, folder: Path) -> list[Comparison]:
    write_text(folder, SEQUENCES, LENGTH)
    images: dict[str, Any] = {"task.data_dir": data_dir, "global_batch_size": 64}
    text: dict[str, Any] = {"config": PROJECT / "configs" / "pretrain.yaml", "task.eval_fraction": 0.5}
    text |= {"task.dataset": folder / "data" / "train.txt"}
    shared = {"evaluation x2: MNIST CNN, Accelerate's loop": 1.2, "evaluation x2: a linear model": 5}
    cases: list[tuple[list[str], dict[str, Any], dict[str, float]]] = [
        (launch("cpu", 1, "fp32"), images, {"evaluation: MNIST CNN, fp32, plain loop": 1.2}),
        (launch("cpu", 1, "bf16"), images, {"evaluation: MNIST CNN, bf16, plain loop": 1.2}),
        (launch("cpu", 1, "fp32"), text, {"evaluation: small Llama, fp32, plain loop": 1.2}),
        (launch("ddp", 2, "fp32"), images, shared),
    ]
    rows = []
    for number, (command, settings, questions) in enumerate(cases):
        if "--mixed_precision=bf16" in command and not has_bf16():
            continue
        side = Side([*command, *own("evaluation", "process", *arguments(settings))[1:]], folder / str(number))
        side.run()
        found = json.loads((side.folder / "found.json").read_text())
        for (question, target), (ours, theirs) in zip(questions.items(), found, strict=True):
            rows.append(Comparison(question, "s", ours, theirs, target, is_gain=True))
    return rows


if __name__ == "__main__":
    pairs.main(measure, __doc__, {"process": measure_in_process})
