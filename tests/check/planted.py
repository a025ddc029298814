"""Faults that raise no error, each as a hook on functions that have a name: what a user's copy may come to do.

    accelerate launch … tests/check/planted.py NAME --check SETTINGS…

runs train.py with one of them.
"""

import contextlib
import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from accelerate import Accelerator, PartialState
from torch import Tensor, nn
from torch.optim import Optimizer

import train
from src.checkpoint import tensors, write
from src.distributed import accelerator
from src.tasks import mnist
from src.tasks.mnist import Digits, Mnist, MnistCnn
from src.training import batches, run
from src.training.batches import MicroBatch
from src.training.evaluation import Scores

Plant = Callable[[pytest.MonkeyPatch], None]


@dataclass
class Fault:
    """A fault and what --check has to say of it."""

    name: str
    yaml: str
    """What it is run under; some only show with shards, others only with replicas."""
    fails: str
    """The check that fails first, and ends the examination."""
    says: str
    """In what they say: the cause."""
    plant: Plant
    arguments: tuple[str, ...] = ()
    is_slow: bool = False


FAULTS: dict[str, Fault] = {}
"""By name, those that need two processes."""
ALONE: dict[str, Fault] = {}
"""By name, those that a single process shows: tests/check/examine.py plants them one after the other in one run of 90
steps an epoch."""
CLIPPED = ("--optim.max_grad_norm=1",)
ROTATED = ("--task.rotation=5",)


def fault(name: str, yaml: str, fails: str, says: str, *arguments: str, slow: bool = False) -> Callable[[Plant], Plant]:
    """Keep a function that plants a fault."""

    def keep(plant: Plant) -> Plant:
        where = ALONE if yaml == "cpu" else FAULTS
        where[name] = Fault(name, yaml, fails, says, plant, arguments, slow)
        return plant

    return keep


def wrap(patch: pytest.MonkeyPatch, owner: Any, name: str, wrapper: Callable[..., Any]) -> None:
    """Call `wrapper(original, *arguments)` in place of what has that name in the module, or class."""
    original = getattr(owner, name)
    patch.setattr(owner, name, lambda *args, **named: wrapper(original, *args, **named))


def wrap_everywhere(patch: pytest.MonkeyPatch, function: Any, wrapper: Callable[..., Any]) -> None:
    """Do so in each module that has imported the function."""
    name = function.__name__
    for module in [sys.modules[module] for module in list(sys.modules) if module.startswith(("train", "src."))]:
        if getattr(module, name, None) is function:
            wrap(patch, module, name, wrapper)


def smaller(patch: pytest.MonkeyPatch) -> None:
    """Give the CNN fewer channels: a step takes a tenth of the time."""

    def build(original: Any, self: MnistCnn, dropout: float = 1.0) -> None:
        original(self, dropout)
        self.conv1, self.conv2 = nn.Conv2d(1, 8, 3), nn.Conv2d(8, 16, 3)
        self.fc1, self.fc2 = nn.Linear(2304, 32), nn.Linear(32, 10)

    wrap(patch, MnistCnn, "__init__", build)


def change_groups(patch: pytest.MonkeyPatch, setting: str, value: object) -> None:
    """Change a setting in the run's parameter groups that have it, not in those that they are compared with."""

    def build(original: Any, *args: Any) -> list[Optimizer]:
        optimizers = original(*args)
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                if setting in group:
                    group[setting] = value
        return optimizers

    wrap(patch, train, "build_optimizers", build)


# ------------------------------------------------------------------------------------------------------------ the data
def change_order(patch: pytest.MonkeyPatch, change: Callable[[Any, np.ndarray], np.ndarray], training: bool) -> None:
    """Change the order of the training data, or of those to evaluate on."""

    def load(original: Any, run: Any, dataset: Any, order: np.ndarray, *rest: Any) -> Any:
        is_training = dataset is not run.eval_set
        return original(run, dataset, change(run, order) if is_training == training else order, *rest)

    wrap(patch, batches, "_load", load)


@fault("every process reads the same shard", "ddp", "Data", "719 left out, 719 too often, on process 1")
def _(patch: pytest.MonkeyPatch) -> None:
    change_order(patch, lambda run, order: np.repeat(order[:: run.world_size], run.world_size), training=True)


@fault("set_epoch forgotten", "fsdp", "Data", "set_epoch was forgotten")
def _(patch: pytest.MonkeyPatch) -> None:
    wrap(patch, batches, "epoch_seed", lambda seed, config, epoch, *of: seed(config, epoch if of else 0, *of))


@fault("one sample dropped", "ddp", "Data", "1 left out")
def _(patch: pytest.MonkeyPatch) -> None:
    change_order(patch, lambda _, order: order[:-1], training=True)


@fault("one sample doubled in evaluation", "ddp", "Data", "0 left out, 1 too often")
def _(patch: pytest.MonkeyPatch) -> None:
    change_order(patch, lambda _, order: np.append(order, 0), training=False)


@fault("an epoch that begins anew where a run goes on", "ddp", "Data", "examples that it has seen", slow=True)
def _(patch: pytest.MonkeyPatch) -> None:
    wrap(patch, batches, "epoch_order", lambda order, run, epoch, done: order(run, epoch, 0))


@fault("an augmentation that depends on the process", "ddp", "Data", "depends on the process", *ROTATED, slow=True)
def _(patch: pytest.MonkeyPatch) -> None:
    rank = int(os.environ["RANK"])
    wrap(patch, batches, "epoch_seed", lambda seed, config, epoch, *of: seed(config, epoch, *(n + rank for n in of)))


@fault("each process has data of its own", "ddp", "Data", "build_datasets makes other data", slow=True)
def _(patch: pytest.MonkeyPatch) -> None:
    def shuffled(original: Any) -> tuple[Digits, Digits]:
        train_set, eval_set = original()
        order = torch.from_numpy(np.random.default_rng().permutation(len(eval_set)))
        return train_set, Digits(eval_set.images[order], eval_set.labels[order])

    wrap(patch, mnist, "bundled_digits", shuffled)


@fault("an order that repeats from epoch 3 on", "cpu", "Data", "an earlier one comes again")
def _(patch: pytest.MonkeyPatch) -> None:
    wrap(patch, batches, "epoch_seed", lambda seed, config, epoch, *of: seed(config, epoch if of else epoch % 2, *of))


@fault("an augmentation that is the same from epoch 3 on", "cpu", "Data", "an augmentation depends on", *ROTATED)
def _(patch: pytest.MonkeyPatch) -> None:
    def seed(original: Any, config: Any, epoch: int, *of: int) -> Any:
        return original(config, min(epoch, 1) if of else epoch, *of)

    wrap(patch, batches, "epoch_seed", seed)


@fault("an augmentation without the seed", "cpu", "Data", "an augmentation depends on", *ROTATED, "--seed=1")
def _(patch: pytest.MonkeyPatch) -> None:
    wrap(patch, batches, "epoch_seed", lambda seed, config, epoch, *of: [0, epoch, *of] if of else seed(config, epoch))


# ------------------------------------------------------------------------------------------------------- the gradients
class Weighted(MicroBatch):
    """A micro-batch whose loss counts more or less."""

    weight = 1.0


def weigh(patch: pytest.MonkeyPatch, factor: Callable[[MicroBatch, int, Any], float]) -> None:
    """Multiply each micro-batch's loss by a factor of it, of their number and of the step's counts."""

    def step(original: Any, run: Any, micro_batches: list[MicroBatch], counts: Any) -> Any:
        weighted = [Weighted(*batch) for batch in micro_batches]
        for own, batch in zip(weighted, micro_batches, strict=True):
            own.weight = batch.weight * factor(batch, len(micro_batches), counts)
        return original(run, weighted, counts)

    wrap(patch, train, "train_step", step)


@fault("the loss averaged per micro-batch, with ragged counts", "ddp", "Steps", "a mean of means",
       "--micro_batch_size=4")  # fmt: skip
def _(patch: pytest.MonkeyPatch) -> None:
    world_size = 2
    weigh(patch, lambda batch, number, counts: counts.targets / (batch.counts.targets * number * world_size))


@fault("a mean over the micro-batches", "cpu", "Steps", "a mean of means")
def _(patch: pytest.MonkeyPatch) -> None:
    weigh(patch, lambda _, number, __: 1 / number)


@fault("gradients summed, not averaged", "fsdp", "Steps", "a sum that was not divided")
def _(patch: pytest.MonkeyPatch) -> None:
    weigh(patch, lambda *_: 2.0)


@fault("all micro-batches forgotten but the last", "cpu", "Steps", "a mean of means")
def _(patch: pytest.MonkeyPatch) -> None:
    def backward(original: Any, self: Accelerator, loss: Tensor) -> None:
        self._models[0].zero_grad()
        original(self, loss)

    wrap(patch, Accelerator, "backward", backward)


@fault("gradients not reduced for one parameter", "ddp", "Steps", "fc1.bias")
def _(patch: pytest.MonkeyPatch) -> None:
    """And so the replicas drift apart."""

    def prepare(original: Any, accelerator: Any, model: Any) -> nn.Module:
        model._ddp_params_and_buffers_to_ignore = ["fc1.bias"]
        return original(accelerator, model)

    wrap(patch, train, "prepare", prepare)


@fault("gradients not cleared", "ddp", "Steps", "not the gradient of the whole batch's", slow=True)
def _(patch: pytest.MonkeyPatch) -> None:
    """They begin where they should not, after a checkpoint too."""
    patch.setattr(train, "step_if_finite", lambda optimizers, _: [optimizer.step() for optimizer in optimizers])


@fault("gradients reduced after each micro-batch", "ddp", "Cost", "reduced after each micro-batch",
       "--micro_batch_size=8", slow=True)  # fmt: skip
def _(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(train, "reducing", lambda *_, **__: contextlib.nullcontext())


@fault("clipping before the gradients are scaled", "ddp", "Steps", "taken before the gradients were scaled", *CLIPPED)
def _(patch: pytest.MonkeyPatch) -> None:
    wrap(patch, train, "grad_norm", lambda norm, *args: norm(*args) * 64)


@fault("clipping by one process's norm", "fsdp", "Steps", "the norm is one process's", *CLIPPED)
def _(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(train, "grad_norm", lambda _, gradients: sum(g.double().square().sum() for g in gradients).sqrt())


@fault("clipping that scales small gradients up", "ddp", "Steps", "clipping that scales small gradients up", *CLIPPED)
def _(patch: pytest.MonkeyPatch) -> None:
    def clip(gradients: list[Tensor], scale: float, norm: Tensor, max_norm: float) -> None:
        torch._foreach_mul_(gradients, (max_norm / norm).to(gradients[0]))

    patch.setattr(train, "scale_and_clip_", clip)


def at_the_end_of_an_epoch(patch: pytest.MonkeyPatch, name: str, wrapper: Callable[..., Any]) -> None:
    """Wrap what train_step calls, but only in the last step of an epoch."""
    steps: list[bool] = []

    def step(original: Any, run: Any, *args: Any) -> Any:
        steps[:] = [(run.progress.step + 1) % run.steps_per_epoch == 0]
        return original(run, *args)

    wrap(patch, train, "train_step", step)
    wrap(patch, train, name, lambda f, *args: wrapper(f, *args) if steps == [True] else f(*args))


@fault("an epoch's last gradient forgotten", "cpu", "Steps", ", step 90)")
def _(patch: pytest.MonkeyPatch) -> None:
    def zeros(original: Any, parameters: Any) -> list[Tensor]:
        gradients = original(parameters)
        torch._foreach_zero_(gradients)
        return gradients

    at_the_end_of_an_epoch(patch, "local_gradients", zeros)


# --------------------------------------------------------------------------------------------------------- the updates
@fault("a parameter group left out of the optimizer", "fsdp", "Same start", "conv1.bias: AdamW, amsgrad=False")
def _(patch: pytest.MonkeyPatch) -> None:
    def without_vectors(original: Any, *args: Any) -> list[Optimizer]:
        optimizers = original(*args)
        del optimizers[0].param_groups[1]
        return optimizers

    wrap(patch, train, "build_optimizers", without_vectors)


GROUP_FAULTS: tuple[tuple[Any, ...], ...] = (
    ("weight decay on norms and biases", "fsdp", "weight_decay", 0.01),
    ("weight decay ignored", "cpu", "weight_decay", 0.0),
    ("betas ignored", "cpu", "betas", (0.9, 0.999), "--optim.betas=[0.8,0.9]"),
    ("another eps", "cpu", "eps", 1e-4),
    ("momentum ignored", "cpu", "momentum", 0, "--optim.name=sgd"),
    ("Nesterov's momentum", "cpu", "nesterov", True, "--optim.name=sgd"),
    ("Muon at a rate of its own", "cpu", "adjust_lr_fn", None, "--optim.name=muon"),
)
"""Name, yaml, setting, its wrong value, arguments."""
for name, yaml, setting, value, *arguments in GROUP_FAULTS:
    says = f", {setting}={value}"
    fault(name, yaml, "Same start", says, *arguments)(partial(change_groups, setting=setting, value=value))


@fault("the last layer in Muon's group", "ddp", "Same start", "fc2.weight: Muon, ", "--optim.name=muon", slow=True)
def _(patch: pytest.MonkeyPatch) -> None:
    def build(original: Any, config: Any, model: nn.Module) -> list[Optimizer]:
        muon, adamw = original(config, model)
        last = [parameter for parameter in model.parameters() if parameter.ndim == 2][-1]
        adamw.param_groups[0]["params"] = [p for p in adamw.param_groups[0]["params"] if p is not last]
        muon.param_groups[0]["params"].append(last)
        return [muon, adamw]

    wrap(patch, train, "build_optimizers", build)


@fault("the learning rate stepped once per process", "ddp", "Steps", "a prepared scheduler steps once per process")
def _(patch: pytest.MonkeyPatch) -> None:
    wrap(patch, train, "lr_at", lambda lr_at, step, *rest: lr_at(2 * step, *rest))


@fault("a schedule that is longer by the number of processes", "ddp", "Steps", "another form or length", slow=True)
def _(patch: pytest.MonkeyPatch) -> None:
    wrap(patch, run, "Schedule", lambda schedule, steps, per_epoch: schedule(2 * steps, per_epoch))


@fault("a schedule that is a step ahead", "cpu", "Steps", "the schedule is ahead of the steps")
def _(patch: pytest.MonkeyPatch) -> None:
    wrap(patch, train, "lr_at", lambda lr_at, step, *rest: lr_at(step + 1, *rest))


@fault("another rate at the last step of each epoch", "cpu", "Steps", "the schedule is ahead of the steps")
def _(patch: pytest.MonkeyPatch) -> None:
    at_the_end_of_an_epoch(patch, "lr_at", lambda lr_at, *args: 2 * lr_at(*args))


@fault("another rate at the first step of epoch 3", "cpu", "Steps", "step 181")
def _(patch: pytest.MonkeyPatch) -> None:
    wrap(patch, train, "lr_at", lambda lr_at, step, *rest: lr_at(step, *rest) * (2 if step == 180 else 1))


@fault("an epoch's last update left out", "cpu", "Steps", "or a step that is not taken")
def _(patch: pytest.MonkeyPatch) -> None:
    def skip(_: Any, optimizers: list[Optimizer], __: Any) -> None:
        for optimizer in optimizers:
            optimizer.zero_grad()

    at_the_end_of_an_epoch(patch, "step_if_finite", skip)


@fault("a buffer not synchronised", "fsdp", "Steps", "differing: seen, on process 1")
def _(patch: pytest.MonkeyPatch) -> None:
    """DDP sends the first process's to all."""

    def build(original: Any, self: nn.Module, *args: Any, **named: Any) -> None:
        original(self, *args, **named)
        self.register_buffer("seen", torch.zeros(()))

    def forward(original: Any, self: Any, images: Tensor) -> Tensor:
        self.seen += images.float().mean() * self.training
        return original(self, images)

    wrap(patch, MnistCnn, "__init__", build)
    wrap(patch, MnistCnn, "forward", forward)


# ------------------------------------------------------------------------------------------------- launch and the start
@fault("FSDP asked for and DDP run", "fsdp", "Launch", "DDP x 2")
def _(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(accelerator, "_fsdp_plugin", lambda *_: None)
    patch.setattr(accelerator, "refuse_another_strategy", lambda *_: None)


@fault("DDP asked for and nothing run", "ddp", "Launch", "one process x 1")
def _(patch: pytest.MonkeyPatch) -> None:
    wrap(patch, accelerator, "Accelerator", lambda build, cpu, **named: build(cpu=False, **named))
    patch.setattr(accelerator, "refuse_another_strategy", lambda *_: None)


@fault("only the root wrapped", "fsdp", "Launch", "FSDP of the root alone x 2")
def _(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(MnistCnn, "_no_split_modules", [])
    patch.setattr(accelerator, "sharded_units", lambda _: 2)


@fault(
    "a process seeded differently at start",
    "fsdp",
    "Same start",
    "differing: conv1.weight, conv1.bias, conv2.weight",
)
def _(patch: pytest.MonkeyPatch) -> None:
    """DDP would send the first process's weights to all."""

    def build(original: Any, config: Any, *rest: Any) -> Any:
        return original(config.model_copy(update={"seed": config.seed + PartialState().process_index}), *rest)

    wrap(patch, train, "new_model", build)


@fault("the same dropout on every process", "ddp", "Same start", "the same units on every process", slow=True)
def _(patch: pytest.MonkeyPatch) -> None:
    wrap(patch, train, "set_seed", lambda set_seed, _: set_seed(0))


# ------------------------------------------------------------------------------------------------------- the evaluation
def in_evaluation(patch: pytest.MonkeyPatch, wrapper: Callable[..., Any]) -> None:
    """Wrap what train.evaluate calls with the batches, not what it is compared with."""
    wrap(patch, train, "evaluate_batches", wrapper)


def after_evaluation(patch: pytest.MonkeyPatch, do: Callable[[Any], object]) -> None:
    """Call it with the run at the end of train.evaluate."""

    def evaluate(original: Any, run: Any, stop: Any) -> Any:
        evaluation = original(run, stop)
        do(run)
        return evaluation

    wrap(patch, train, "evaluate", evaluate)


@fault(
    "an evaluation that is a mean of the batches' means",
    "ddp",
    "Evaluation",
    "a mean of each process's or each batch's",
)
def _(patch: pytest.MonkeyPatch) -> None:
    def score(original: Any, task: Any, model: Any, found: Iterator[MicroBatch], *rest: Any) -> Scores:
        totals, outputs = torch.zeros(3, dtype=torch.float64), list[dict[str, Tensor]]()
        for batch in found:
            scores = original(task, model, [batch], *rest)
            targets = max(scores.totals[1].item(), 1)
            totals += torch.tensor([scores.totals[0] / targets, batch.weight, scores.totals[2]])
            outputs.append(scores.outputs)
        return Scores(totals, {name: torch.cat([part[name] for part in outputs]) for name in outputs[0]})

    in_evaluation(patch, score)


@fault("stand-ins counted in the evaluation", "ddp", "Evaluation", "counted padding", slow=True)
def _(patch: pytest.MonkeyPatch) -> None:
    def score(original: Any, task: Any, model: Any, found: Iterator[MicroBatch], *rest: Any) -> Scores:
        batches = list(found)
        scores = original(task, model, batches, *rest)
        scores.totals[1] += sum(batch.counts.targets for batch in batches if not batch.weight)
        return scores

    in_evaluation(patch, score)


@fault("an evaluation without the last batch", "cpu", "Evaluation", "examples left out")
def _(patch: pytest.MonkeyPatch) -> None:
    in_evaluation(patch, lambda score, task, model, found, *rest: score(task, model, list(found)[:-1], *rest))


@fault("a process without an evaluation batch", "ddp", "Data", "a process has fewer batches than others")
def _(patch: pytest.MonkeyPatch) -> None:
    def some(original: Any, run: Any) -> Any:
        return iter(()) if run.rank else original(run)

    wrap_everywhere(patch, batches.evaluation_batches, some)


@fault("dropout in the evaluation", "cpu", "Evaluation", "dropout and the like are on")
def _(patch: pytest.MonkeyPatch) -> None:
    in_evaluation(patch, lambda score, task, model, *rest: score(task, model.train(), *rest))


@fault("other weights in the evaluation", "cpu", "Evaluation", "other weights, such as an average")
def _(patch: pytest.MonkeyPatch) -> None:
    def score(original: Any, task: Any, model: nn.Module, *rest: Any) -> Any:
        parameters: list[Tensor] = list(model.parameters())
        kept = [parameter.detach().clone() for parameter in parameters]
        with torch.no_grad():
            torch._foreach_mul_(parameters, 0.9)
            scores = original(task, model, *rest)
            torch._foreach_copy_(parameters, kept)
        return scores

    in_evaluation(patch, score)


@fault("an evaluation that leaves weights changed", "cpu", "Evaluation", "differing: weights")
def _(patch: pytest.MonkeyPatch) -> None:
    def change(run: Any) -> None:
        with torch.no_grad():
            torch._foreach_mul_(run.parameters, 0.999)

    after_evaluation(patch, change)


@fault("an evaluation that clears the optimizer's state", "cpu", "Evaluation", "differing: optimizer")
def _(patch: pytest.MonkeyPatch) -> None:
    after_evaluation(patch, lambda run: run.optimizers[0].state.clear())


@fault("an evaluation that draws the training's random numbers", "cpu", "Evaluation", "differing: random numbers")
def _(patch: pytest.MonkeyPatch) -> None:
    after_evaluation(patch, lambda _: torch.rand(()))


@fault("an evaluation that leaves a layer's dropout off", "cpu", "Evaluation", "differing: mode")
def _(patch: pytest.MonkeyPatch) -> None:
    after_evaluation(patch, lambda run: run.model.dropout1.eval())


@fault("an evaluation that leaves dropout off", "ddp", "Evaluation", "must end with model.train()", slow=True)
def _(patch: pytest.MonkeyPatch) -> None:
    after_evaluation(patch, lambda run: run.model.eval())


# -------------------------------------------------------------------------------------------------- checkpoint and task
@fault("a checkpoint that forgets the optimizer", "fsdp", "Checkpoint", "the optimizer's state")
def _(patch: pytest.MonkeyPatch) -> None:
    wrap(patch, write, "run_tensors", lambda run_tensors, model, _: run_tensors(model, []))


@fault("a checkpoint whose optimizer state is put back only where there is some", "fsdp", "Checkpoint",
       "the optimizer's state", slow=True)  # fmt: skip
def _(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(tensors, "create_optimizer_state", lambda *_: None)


@fault("a checkpoint that forgets the random numbers", "ddp", "Checkpoint", "the random numbers", slow=True)
def _(patch: pytest.MonkeyPatch) -> None:
    other = torch.Generator().manual_seed(1).get_state().numpy().tobytes().hex()
    wrap(patch, write, "random_state", lambda state, device: state(device) | {"torch": other})


@fault("a step added to a checkpoint's", "cpu", "Checkpoint", "the position in the data")
def _(patch: pytest.MonkeyPatch) -> None:
    def load(original: Any, run: Any) -> None:
        original(run)
        run.progress.step += 1

    wrap(patch, train, "load_checkpoint", load)


@fault("a mean loss", "cpu", "Steps", "Task.loss returns a mean in place of the sum")
def _(patch: pytest.MonkeyPatch) -> None:
    wrap(patch, Mnist, "loss", lambda loss, self, model, batch: loss(self, model, batch) / len(batch["labels"]))


if __name__ == "__main__":
    name, *arguments = sys.argv[1:]
    sys.argv[1:] = arguments
    with pytest.MonkeyPatch.context() as patch:
        smaller(patch)
        FAULTS[name].plant(patch)
        train.main()
