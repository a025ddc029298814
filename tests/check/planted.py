"""Faults that raise no error, each as a hook on a function that has a name: what a user's copy may come to do."""

import contextlib
import os
import pkgutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any

import numpy as np
import pytest
import torch
from accelerate.utils import set_seed
from torch import nn
from torch.optim import SGD, Optimizer

from src.tasks.mnist import Digits, MnistCnn
from src.training.batches import MicroBatch
from src.training.evaluation import Scores

Hook = Callable[..., Any]
"""Called in place of a function, with that and its arguments."""
CLIPPED = ("--optim.max_grad_norm=1",)
ROTATED = ("--task.rotation=5",)
NOT_MOVED = ("--task.rotation=0", "--task.shift=0")
BATCH_NORM = "BatchNorm lets an example's loss depend on its neighbours: use GroupNorm"
SLOW = 0.1
"""A momentum with which the statistics of processes differ little."""
PER_EPOCH = 90
"""Steps of an epoch in tests/check/examine.py."""


@dataclass
class Fault:
    """A fault under a yaml (some only show with shards, others only with replicas), the check that fails first and how
    the cause begins that it gives; and where a hook is put in place of a function, by its module or class."""

    name: str
    yaml: str
    fails: str
    cause: str | tuple[str, ...]
    where: str
    hook: Hook
    arguments: tuple[str, ...] = ()
    measured: str = ""
    """What is said of what was measured."""


def rank() -> int:
    return int(os.environ["RANK"])


def put(patch: pytest.MonkeyPatch, where: str, hook: Hook) -> None:
    original = pkgutil.resolve_name(where)
    patch.setattr(where, lambda *args, **named: hook(original, *args, **named))


def build_smaller(build: Hook, self: MnistCnn, dropout: float = 1.0) -> None:
    """Give the CNN fewer channels: a step takes a tenth of the time."""
    build(self, dropout)
    self.conv1, self.conv2 = nn.Conv2d(1, 8, 3), nn.Conv2d(8, 16, 3)
    self.fc1, self.fc2 = nn.Linear(2304, 32), nn.Linear(32, 10)


# ------------------------------------------------------------------------------------------------------------ the data
def shuffled_anew(build: Hook) -> tuple[Digits, Digits]:
    train_set, eval_set = build()
    order = torch.from_numpy(np.random.default_rng().permutation(len(eval_set)))
    return train_set, Digits(eval_set.images[order], eval_set.labels[order])


def with_unseeded_flips(read: Hook, self: Digits, indices: list[int]) -> Any:
    examples = read(self, indices)
    is_flipped = torch.rand(len(indices), 1, 1) < 0.5
    return examples | {"images": examples["images"].flip(2).where(is_flipped, examples["images"])}


def load_on_the_first(load: Hook, run: Any, dataset: Any, *rest: Any) -> Any:
    batches = load(run, dataset, *rest)
    return islice(batches, 0) if run.rank and dataset is run.eval_set else batches


# ------------------------------------------------------------------------------------------------------- the gradients
class Weighted(MicroBatch):
    """A micro-batch whose loss counts more or less."""

    weight = 1.0


def weighted(factor: Callable[[MicroBatch, int, Any], float]) -> Hook:
    """Multiply each micro-batch's loss by a factor of it, of their number and of the step's counts."""

    def step(original: Hook, run: Any, micro_batches: list[MicroBatch], counts: Any) -> Any:
        changed = [Weighted(*batch) for batch in micro_batches]
        for own, batch in zip(changed, micro_batches, strict=True):
            own.weight = batch.weight * factor(batch, len(micro_batches), counts)
        return original(run, changed, counts)

    return step


def forgetting_earlier_ones(reducing: Hook, run: Any, is_last: bool) -> Any:
    run.model.zero_grad()
    return reducing(run, is_last)


def prepare_without_a_bias(prepare: Hook, accelerator: Any, model: Any) -> nn.Module:
    """The replicas drift apart."""
    model._ddp_params_and_buffers_to_ignore = ["fc1.bias"]
    return prepare(accelerator, model)


def in_the_epochs_last_step(where: str, hook: Hook) -> Hook:
    """Put a hook on what train_step calls, but only then."""

    def step(original: Hook, run: Any, *args: Any) -> Any:
        with pytest.MonkeyPatch.context() as patch:
            if (run.progress.step + 1) % PER_EPOCH == 0:
                put(patch, where, hook)
            return original(run, *args)

    return step


# --------------------------------------------------------------------------------------------------------- the updates
def with_setting(name: str, value: object) -> Hook:
    """Change it in the run's parameter groups that have it, not in those that they are compared with."""

    def build(original: Hook, *args: Any) -> list[Optimizer]:
        optimizers = original(*args)
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                group |= {name: value} if name in group else {}
        return optimizers

    return build


def without_vectors(build: Hook, *args: Any) -> list[Optimizer]:
    optimizers = build(*args)
    del optimizers[0].param_groups[1]
    return optimizers


def last_layer_in_muon(build: Hook, config: Any, model: nn.Module) -> list[Optimizer]:
    muon, adamw = build(config, model)
    last = [parameter for parameter in model.parameters() if parameter.ndim == 2][-1]
    adamw.param_groups[0]["params"] = [p for p in adamw.param_groups[0]["params"] if p is not last]
    muon.param_groups[0]["params"].append(last)
    return [muon, adamw]


def build_with_a_buffer(build: Hook, self: nn.Module, *args: Any, **named: Any) -> None:
    """DDP sends the first process's to all."""

    def see(model: Any, inputs: Any) -> None:
        model.seen += inputs[0].float().mean() * model.training

    build(self, *args, **named)
    self.register_buffer("seen", torch.zeros(()))
    self.register_forward_pre_hook(see)


def build_with_batch_norm(momentum: float = 1.0) -> Hook:
    def build(original: Hook, self: Any, *args: Any, **named: Any) -> None:
        original(self, *args, **named)
        self.conv2 = nn.Sequential(nn.BatchNorm2d(8, momentum=momentum), self.conv2)

    return build


# ----------------------------------------------------------------------------------------------------------- the start
def prepare_the_root_alone(_: Hook, accelerator: Any, model: Any) -> nn.Module:
    model._no_split_modules = []
    return accelerator.prepare(model, SGD(model.parameters()))[0]


# ------------------------------------------------------------------------------------------------------ the evaluation
def after_evaluation(do: Callable[[Any], object]) -> Hook:
    """Call it with the run at the end of train.evaluate."""

    def evaluate(original: Hook, run: Any, stop: Any) -> Any:
        evaluation = original(run, stop)
        do(run)
        return evaluation

    return evaluate


def mean_of_means(evaluate: Hook, task: Any, model: Any, found: Iterator[MicroBatch], *rest: Any) -> Scores:
    batches = list(found)
    scores = evaluate(task, model, batches, *rest)
    totals = torch.stack([evaluate(task, model, [batch], *rest).totals for batch in batches])
    means = totals[:, 0] / totals[:, 1].clamp(min=1)
    scores.totals[:2] = torch.stack([means.sum(), torch.tensor(sum(batch.weight for batch in batches))])
    return scores


def with_stand_ins(evaluate: Hook, task: Any, model: Any, found: Iterator[MicroBatch], *rest: Any) -> Scores:
    batches = list(found)
    scores = evaluate(task, model, batches, *rest)
    scores.totals[1] += sum(batch.counts["targets"] for batch in batches if not batch.weight)
    return scores


@torch.no_grad()
def multiply(run: Any, factor: float) -> None:
    torch._foreach_mul_(run.parameters, factor)


def with_other_weights(evaluate: Hook, run: Any, stop: Any) -> Any:
    multiply(run, 0.5)
    evaluation = evaluate(run, stop)
    multiply(run, 2)
    return evaluation


def with_a_term_over_the_batch(evaluate: Hook, self: Any, model: Any, batch: Any) -> Any:
    loss, outputs = evaluate(self, model, batch)
    return loss + 100 * len(batch["labels"]) * outputs["probabilities"][:, 0].mean() ** 2, outputs


def with_a_mean(evaluate: Hook, self: Any, model: Any, batch: Any) -> Any:
    loss, outputs = evaluate(self, model, batch)
    return loss / len(batch["labels"]), outputs


def with_noise(evaluate: Hook, self: Any, model: Any, batch: Any) -> Any:
    factors = 1 + 0.5 * torch.randn(len(batch["images"]), 1, 1)
    return evaluate(self, model, batch | {"images": batch["images"] * factors})


# -------------------------------------------------------------------------------------------------------- a checkpoint
def load_a_step_on(load: Hook, run: Any) -> None:
    load(run)
    run.progress.step += 1


EPOCH_SEED, EPOCH_ORDER, LOAD = (f"src.training.batches.{name}" for name in ("epoch_seed", "epoch_order", "_load"))
FAULTS = [
    Fault("every process reads the same shard", "ddp", "Data", "processes read the same examples",
          EPOCH_ORDER, lambda order, run, *rest: np.repeat(order(run, *rest)[:: run.world_size], run.world_size),
          measured="719 missing, 719 duplicated, on process 1"),
    Fault("set_epoch forgotten", "fsdp", "Data", "set_epoch was forgotten",
          EPOCH_SEED, lambda seed, config, epoch, *of: seed(config, epoch if of else 0, *of)),
    Fault("one sample dropped", "ddp", "Data", "examples are left out",
          EPOCH_ORDER, lambda order, *args: order(*args)[:-1],
          measured="1 missing"),
    Fault("one sample doubled in evaluation", "ddp", "Data", "examples are counted twice",
          LOAD, lambda load, run, dataset, order, *rest:
          load(run, dataset, np.append(order, 0) if dataset is run.eval_set else order, *rest),
          measured="0 missing, 1 duplicated"),
    Fault("a process without an evaluation batch", "ddp", "Data", "a process has fewer batches than others",
          LOAD, load_on_the_first),
    Fault("an epoch that begins anew where a run goes on", "ddp", "Data", "a run that was killed resumes with examples",
          EPOCH_ORDER, lambda order, run, epoch, done: order(run, epoch, 0)),
    Fault("an augmentation that depends on the process", "ddp", "Data", "random numbers that depend on the process",
          EPOCH_SEED, lambda seed, config, epoch, *of: seed(config, epoch, *(part + rank() for part in of)), ROTATED),
    Fault("each process has data of its own", "ddp", "Data", "build_datasets makes other data",
          "src.tasks.mnist.bundled_digits", shuffled_anew),
    Fault("an order that repeats from epoch 3 on", "cpu", "Data", "set_epoch was forgotten",
          EPOCH_SEED, lambda seed, config, epoch, *of: seed(config, epoch if of else epoch % 2, *of), NOT_MOVED),
    Fault("a dataset with unseeded random numbers", "ddp", "Data", "unseeded random numbers in the dataset",
          "src.tasks.mnist.Digits.__getitems__", with_unseeded_flips, NOT_MOVED),
    Fault("a dataset with unseeded random numbers, on one process", "cpu", "Data", "unseeded random numbers in the",
          "src.tasks.mnist.Digits.__getitems__", with_unseeded_flips, NOT_MOVED),
    Fault("an augmentation that is the same from epoch 3 on", "cpu", "Data", "unseeded random numbers",
          EPOCH_SEED, lambda seed, config, epoch, *of: seed(config, min(epoch, 1) if of else epoch, *of), ROTATED),
    Fault("an augmentation without the seed", "cpu", "Data", "unseeded random numbers",
          EPOCH_SEED, lambda seed, config, epoch, *of: [0, epoch, *of] if of else seed(config, epoch),
          (*ROTATED, "--seed=1")),

    Fault("the loss averaged per micro-batch, with ragged counts", "ddp", "Steps", "a mean of means",
          "train.train_step",
          weighted(lambda batch, number, counts: counts["targets"] / (batch.counts["targets"] * number * 2)),
          ("--micro_batch_size=4",)),
    Fault("a mean over the micro-batches", "cpu", "Steps", "micro-batches are averaged",
          "train.train_step", weighted(lambda _, number, __: 1 / number)),
    Fault("gradients summed, not averaged", "fsdp", "Steps", "a sum that was not divided",
          "train.train_step", weighted(lambda *_: 2.0)),
    Fault("all micro-batches forgotten but the last", "cpu", "Steps", "micro-batches are averaged or forgotten",
          "train.gradient_sync", forgetting_earlier_ones),
    Fault("a mean loss", "cpu", "Steps", "Task.loss returns a mean in place of the sum", "src.tasks.mnist.Mnist.loss",
          lambda loss, self, model, batch: loss(self, model, batch) / len(batch["labels"])),
    Fault("a mean loss, with clipping", "cpu", "Steps", "Task.loss returns a mean in place of the sum",
          "src.tasks.mnist.Mnist.loss",
          lambda loss, self, model, batch: loss(self, model, batch) / len(batch["labels"]), CLIPPED),
    Fault("gradients summed, with clipping", "ddp", "Steps", "a sum that was not divided",
          "train.train_step", weighted(lambda *_: 2.0), CLIPPED),
    Fault("BatchNorm", "ddp", "Steps", BATCH_NORM,
          "src.tasks.mnist.MnistCnn.__init__", build_with_batch_norm()),
    Fault("BatchNorm that shows in gradients alone", "ddp", "Steps", BATCH_NORM,
          "src.tasks.mnist.MnistCnn.__init__", build_with_batch_norm(momentum=SLOW)),
    Fault("BatchNorm that shows in gradients alone, with clipping", "ddp", "Steps", BATCH_NORM,
          "src.tasks.mnist.MnistCnn.__init__", build_with_batch_norm(momentum=SLOW), CLIPPED),
    Fault("gradients not reduced for one parameter", "ddp", "Steps", "a parameter that is not reduced",
          "src.training.run.prepare", prepare_without_a_bias,
          measured="fc1.bias"),
    Fault("gradients not cleared", "ddp", "Steps", "gradients are not cleared",
          "train.step_if_finite", lambda _, optimizers, __: [optimizer.step() for optimizer in optimizers]),
    Fault("gradients reduced after each micro-batch", "ddp", "Cost", "gradients are reduced after each micro-batch",
          "train.gradient_sync", lambda *_, **__: contextlib.nullcontext(), ("--micro_batch_size=2",)),
    Fault("clipping before the gradients are scaled", "ddp", "Steps", "clipped by a wrong norm",
          "train.grad_norm", lambda norm, *args: norm(*args) * 64, CLIPPED),
    Fault("clipping by one process's norm", "fsdp", "Steps", "clipped by a wrong norm: it is one", "train.grad_norm",
          lambda _, __, gradients, ___: sum(g.double().square().sum() for g in gradients).sqrt(), CLIPPED),
    Fault("clipping that scales small gradients up", "ddp", "Steps", "clipping scales small gradients up",
          "train.scale_and_clip_",
          lambda _, gradients, scale, norm, most: torch._foreach_mul_(gradients, (most / norm).to(gradients[0])),
          CLIPPED),
    Fault("an epoch's last gradient forgotten", "cpu", "Steps", "the gradients of an epoch's last step",
          "train.train_step",
          in_the_epochs_last_step("train.local_gradients", lambda of, parameters: [g.zero_() for g in of(parameters)]),
          measured=f", step {PER_EPOCH})"),

    Fault("a parameter group left out of the optimizer", "fsdp", "Same start", "a parameter is in no group",
          "train.build_optimizers", without_vectors,
          measured="conv1.bias: AdamW, amsgrad=False"),
    Fault("the last layer in Muon's group", "ddp", "Same start", "a parameter is in no group, or in the wrong",
          "train.build_optimizers", last_layer_in_muon, ("--optim.name=muon",),
          measured="fc2.weight: Muon, "),
    Fault("the learning rate stepped once per process", "ddp", "Steps", "the schedule has another pace or length",
          "train.lr_at", lambda lr_at, step, *rest: lr_at(2 * step, *rest)),
    Fault("a schedule that is longer by the number of processes", "ddp", "Steps", "the schedule has another pace",
          "train.lr_at", lambda lr_at, step, optim, steps, per_epoch: lr_at(step, optim, 2 * steps, per_epoch)),
    Fault("a schedule that is a step ahead", "cpu", "Steps", "the schedule is ahead of the steps",
          "train.lr_at", lambda lr_at, step, *rest: lr_at(step + 1, *rest)),
    Fault("another rate at the last step of each epoch", "cpu", "Steps", "the schedule is ahead of the steps",
          "train.train_step", in_the_epochs_last_step("train.lr_at", lambda lr_at, *args: 2 * lr_at(*args))),
    Fault("another rate at the first step of epoch 3", "cpu", "Steps", "the schedule is ahead of the steps",
          "train.lr_at", lambda lr_at, step, *rest: lr_at(step, *rest) * (2 if step == 2 * PER_EPOCH else 1),
          measured=f"step {2 * PER_EPOCH + 1}"),
    Fault("an epoch's last update left out", "cpu", "Steps", "a step that is not taken", "train.train_step",
          in_the_epochs_last_step("train.step_if_finite", lambda _, all, __: [each.zero_grad() for each in all])),
    Fault("a buffer not synchronised", "fsdp", "Steps", "a buffer that depends on each process's own examples",
          "src.tasks.mnist.MnistCnn.__init__", build_with_a_buffer,
          measured="differing: seen, on process 1"),

    Fault("only the root wrapped", "fsdp", "Launch", "FSDP shards the root alone",
          "src.training.run.prepare", prepare_the_root_alone,
          measured="FSDP of the root alone x 2"),
    Fault("a process seeded differently at start", "fsdp", "Same start",
          "processes built different models", "src.training.run.new_model",
          lambda build, config, *rest: build(config.model_copy(update={"seed": config.seed + rank()}), *rest),
          measured="differing: conv1.weight, conv1.bias, conv2.weight"),
    Fault("the same dropout on every process", "ddp", "Same start", "dropout drops the same units on every process",
          "src.checkpoint.resume.set_seed", lambda *_: set_seed(0)),

    Fault("an evaluation that is a mean of the batches' means", "ddp", "Evaluation",
          "a mean of each process's or each batch's mean", "train.evaluate_batches", mean_of_means),
    Fault("stand-ins counted in the evaluation", "ddp", "Evaluation", "a mean of each process's or each batch's mean",
          "train.evaluate_batches", with_stand_ins),
    Fault("an evaluation without the last batch", "cpu", "Evaluation", "examples are left out",
          "train.evaluate_batches",
          lambda evaluate, task, model, found, *rest: evaluate(task, model, list(found)[:-1], *rest)),
    Fault("dropout in the evaluation", "cpu", "Evaluation", "dropout or similar is active", "train.evaluate_batches",
          lambda evaluate, task, model, *rest: evaluate(task, model.train(), *rest)),
    Fault("an evaluation whose task returns a mean", "cpu", "Evaluation", "Task.evaluate returns a mean in place",
          "src.tasks.mnist.Mnist.evaluate", with_a_mean),
    # a device that evaluates as many examples at once as the reference finds no other eval/loss than that
    Fault("an evaluation with a term over the batch", "ddp", "Evaluation",
          ("an example's loss depends on those", "Task.evaluate returns a mean in place of the sum, or an example's"),
          "src.tasks.mnist.Mnist.evaluate", with_a_term_over_the_batch),
    Fault("an evaluation whose task draws random numbers", "cpu", "Evaluation", "Task.loss or evaluate draws random",
          "src.tasks.mnist.Mnist.evaluate", with_noise),
    Fault("an evaluation whose task draws random numbers, on two", "ddp", "Evaluation", "Task.loss or evaluate draws",
          "src.tasks.mnist.Mnist.evaluate", with_noise),
    Fault("a loss that draws random numbers", "cpu", "Steps",
          "Task.loss returns a mean in place of the sum, or of other targets than Task.count counts, or an "
          "example's loss depends on its neighbours, or on random numbers that Task.loss draws",
          "src.tasks.mnist.Mnist.loss", with_noise),
    Fault("other weights in the evaluation", "cpu", "Evaluation", "the metrics are those of other weights",
          "train.evaluate", with_other_weights),
    Fault("an evaluation that leaves weights changed", "cpu", "Evaluation", "evaluate() changes weights",
          "train.evaluate", after_evaluation(lambda run: multiply(run, 0.999)),
          measured="differing: weights"),
    Fault("an evaluation that clears the optimizer's state", "cpu", "Evaluation", "evaluate() changes the optimizer",
          "train.evaluate", after_evaluation(lambda run: run.optimizers[0].state.clear()),
          measured="differing: optimizer"),
    Fault("an evaluation that draws the training's random numbers", "cpu", "Evaluation",
          "evaluate() draws the training's random",
          "train.evaluate", after_evaluation(lambda _: torch.rand(())),
          measured="differing: random numbers"),
    Fault("an evaluation that leaves a layer's dropout off", "cpu", "Evaluation",
          "evaluate() must end with model.train()",
          "train.evaluate", after_evaluation(lambda run: run.model.dropout1.eval()),
          measured="differing: mode"),
    Fault("an evaluation that leaves dropout off", "ddp", "Evaluation", "evaluate() must end with model.train()",
          "train.evaluate", after_evaluation(lambda run: run.model.eval())),

    Fault("a checkpoint that forgets the optimizer", "fsdp", "Checkpoint", "the checkpoint lacks the optimizer's state",
          "src.checkpoint.write.run_tensors", lambda run_tensors, model, _: run_tensors(model, [])),
    Fault("a checkpoint whose optimizer state is put back only where there is some", "fsdp", "Checkpoint",
          "the checkpoint lacks the optimizer", "src.checkpoint.tensors.create_optimizer_state", lambda *_: None),
    Fault("a checkpoint that forgets the random numbers", "ddp", "Checkpoint", "the checkpoint lacks the random",
          "src.checkpoint.resume.restore_random_state", lambda *_: None),
    Fault("a step added to a checkpoint's", "cpu", "Checkpoint", "the position in the data",
          "src.check.between_steps.load_checkpoint", load_a_step_on),
]  # fmt: skip

GROUP_FAULTS: list[tuple[Any, ...]] = [
    ("weight decay on norms and biases", "fsdp", "weight_decay", 0.01),
    ("weight decay ignored", "cpu", "weight_decay", 0.0),
    ("betas ignored", "cpu", "betas", (0.9, 0.999), "--optim.betas=[0.8,0.9]"),
    ("another eps", "cpu", "eps", 1e-4),
    ("momentum ignored", "cpu", "momentum", 0, "--optim.name=sgd"),
    ("Nesterov's momentum", "cpu", "nesterov", True, "--optim.name=sgd"),
    ("Muon at a rate of its own", "cpu", "adjust_lr_fn", None, "--optim.name=muon"),
]
"""Name, yaml, setting, its value, arguments."""
for name, yaml, setting, value, *arguments in GROUP_FAULTS:
    hook = with_setting(setting, value)
    measured = f", {setting}={value}"
    cause = "a setting of optim is ignored, or a parameter is in the wrong group"
    FAULTS.append(Fault(name, yaml, "Same start", cause, "train.build_optimizers", hook, tuple(arguments), measured))
