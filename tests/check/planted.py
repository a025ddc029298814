"""Bugs that raise no error, each as a hook on a function that has a name: what a user's copy may come to do."""

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
    """A part of what was measured."""


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
def shuffle_anew(build: Hook) -> tuple[Digits, Digits]:
    train_set, eval_set = build()
    order = torch.from_numpy(np.random.default_rng().permutation(len(eval_set)))
    return train_set, Digits(eval_set.images[order], eval_set.labels[order])


def flip_unseeded(read: Hook, self: Digits, indices: list[int]) -> Any:
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


def forget_earlier_ones(sync: Hook, run: Any, is_last: bool) -> Any:
    run.model.zero_grad()
    return sync(run, is_last)


def prepare_without_a_bias(prepare: Hook, accelerator: Any, model: Any) -> nn.Module:
    """The replicas drift apart."""
    model._ddp_params_and_buffers_to_ignore = ["fc1.bias"]
    return prepare(accelerator, model)


def take_mean(loss: Hook, self: Any, model: Any, batch: Any) -> Any:
    return loss(self, model, batch) / len(batch["labels"])


def add_noise(loss: Hook, self: Any, model: Any, batch: Any) -> Any:
    factors = 1 + 0.5 * torch.randn(len(batch["images"]), 1, 1)
    return loss(self, model, batch | {"images": batch["images"] * factors})


def in_last_step(where: str, hook: Hook) -> Hook:
    """Put a hook on what train_step calls, but only in an epoch's last step."""

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


def forget_vectors(build: Hook, *args: Any) -> list[Optimizer]:
    optimizers = build(*args)
    del optimizers[0].param_groups[1]
    return optimizers


def last_layer_in_muon(build: Hook, config: Any, model: nn.Module) -> list[Optimizer]:
    muon, adamw = build(config, model)
    last = [parameter for parameter in model.parameters() if parameter.ndim == 2][-1]
    adamw.param_groups[0]["params"] = [p for p in adamw.param_groups[0]["params"] if p is not last]
    muon.param_groups[0]["params"].append(last)
    return [muon, adamw]


# ------------------------------------------------------------------------------------------------------------ the model
def build_with_a_buffer(build: Hook, self: nn.Module, *args: Any, **named: Any) -> None:
    """DDP sends the first process's to all."""

    def see(model: Any, inputs: Any) -> None:
        model.seen += inputs[0].float().mean() * model.training

    build(self, *args, **named)
    self.register_buffer("seen", torch.zeros(()))
    self.register_forward_pre_hook(see)


def with_batch_norm(momentum: float) -> Hook:
    """With a small momentum, the statistics of processes differ little, and the fault shows in gradients alone."""

    def build(original: Hook, self: Any, *args: Any, **named: Any) -> None:
        original(self, *args, **named)
        self.conv2 = nn.Sequential(nn.BatchNorm2d(8, momentum=momentum), self.conv2)

    return build


def prepare_the_root_alone(_: Hook, accelerator: Any, model: Any) -> nn.Module:
    model._no_split_modules = []
    return accelerator.prepare(model, SGD(model.parameters()))[0]


# ------------------------------------------------------------------------------------------------------ the evaluation
def then(do: Callable[[Any], object]) -> Hook:
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


def count_dummies(evaluate: Hook, task: Any, model: Any, found: Iterator[MicroBatch], *rest: Any) -> Scores:
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


def add_batch_term(evaluate: Hook, self: Any, model: Any, batch: Any) -> Any:
    loss, outputs = evaluate(self, model, batch)
    return loss + 100 * len(batch["labels"]) * outputs["probabilities"][:, 0].mean() ** 2, outputs


def evaluate_mean(evaluate: Hook, self: Any, model: Any, batch: Any) -> Any:
    loss, outputs = evaluate(self, model, batch)
    return loss / len(batch["labels"]), outputs


# -------------------------------------------------------------------------------------------------------- a checkpoint
def load_a_step_on(load: Hook, run: Any) -> None:
    load(run)
    run.progress.step += 1


SEED, ORDER, LOAD = (f"src.training.batches.{name}" for name in ("epoch_seed", "epoch_order", "_load"))
LOSS, EVALUATE = "src.tasks.mnist.Mnist.loss", "src.tasks.mnist.Mnist.evaluate"
READ, BUILD = "src.tasks.mnist.Digits.__getitems__", "src.tasks.mnist.MnistCnn.__init__"
STEP, BATCHES, OPTIMIZERS = "train.train_step", "train.evaluate_batches", "train.build_optimizers"
CLIPPED, MUON = ("--optim.max_grad_norm=1",), ("--optim.name=muon",)
ROTATED, STILL = ("--task.rotation=5",), ("--task.rotation=0", "--task.shift=0")
BATCH_NORM = "BatchNorm lets an example's loss depend on its neighbours: use GroupNorm"
MEAN_OF_MEANS = "a mean of each process's or each batch's mean"
MEAN, DRAWS = "Task.loss returns a mean in place of the sum", "Task.loss or evaluate draws random"
# a device that evaluates as many examples at once as the reference finds no other eval/loss than that
DEPENDS = ("an example's loss depends on those", "Task.evaluate returns a mean in place of the sum, or an example's")

ROWS: dict[str, list[tuple[Any, ...]]] = {
    "Launch": [
        ("only the root wrapped", "fsdp", "FSDP shards the root alone",
         "src.training.run.prepare", prepare_the_root_alone, (), "FSDP of the root alone x 2"),
    ],
    "Data": [
        ("every process reads the same shard", "ddp", "processes read the same examples", ORDER,
         lambda order, run, *rest: np.repeat(order(run, *rest)[:: run.world_size], run.world_size), (),
         "719 missing, 719 duplicated, on process 1"),
        ("set_epoch forgotten", "fsdp", "set_epoch was forgotten",
         SEED, lambda seed, config, epoch, *of: seed(config, epoch if of else 0, *of)),
        ("an order that repeats from epoch 3 on", "cpu", "set_epoch was forgotten",
         SEED, lambda seed, config, epoch, *of: seed(config, epoch if of else epoch % 2, *of), STILL),
        ("one sample dropped", "ddp", "examples are left out", ORDER, lambda order, *args: order(*args)[:-1], (),
         "1 missing"),
        ("one sample doubled in evaluation", "ddp", "examples are counted twice",
         LOAD, lambda load, run, dataset, order, *rest:
         load(run, dataset, np.append(order, 0) if dataset is run.eval_set else order, *rest), (),
         "0 missing, 1 duplicated"),
        ("a process without an evaluation batch", "ddp", "a process has fewer batches than others",
         LOAD, load_on_the_first),
        ("an epoch that begins anew where a run resumes", "ddp", "a run that was killed resumes with examples",
         ORDER, lambda order, run, epoch, done: order(run, epoch, 0)),
        ("each process has data of its own", "ddp", "build_datasets makes other data",
         "src.tasks.mnist.bundled_digits", shuffle_anew),
        ("a dataset with unseeded random numbers", "ddp", "unseeded random numbers in the", READ, flip_unseeded, STILL),
        ("a dataset with unseeded random numbers, on one process", "cpu", "unseeded random numbers in the",
         READ, flip_unseeded, STILL),
        ("an augmentation that depends on the process", "ddp", "random numbers that depend on the process",
         SEED, lambda seed, config, epoch, *of: seed(config, epoch, *(part + rank() for part in of)), ROTATED),
        ("an augmentation that is the same from epoch 3 on", "cpu", "unseeded random numbers",
         SEED, lambda seed, config, epoch, *of: seed(config, min(epoch, 1) if of else epoch, *of), ROTATED),
        ("an augmentation without the seed", "cpu", "unseeded random numbers",
         SEED, lambda seed, config, epoch, *of: [0, epoch, *of] if of else seed(config, epoch),
         (*ROTATED, "--seed=1")),
    ],
    "Same start": [
        ("a process seeded differently at start", "fsdp", "processes built different models",
         "src.training.run.new_model", lambda build, config, *rest:
         build(config.model_copy(update={"seed": config.seed + rank()}), *rest), (),
         "differing: conv1.weight, conv1.bias, conv2.weight"),
        ("the same dropout on every process", "ddp", "dropout drops the same units on every process",
         "src.checkpoint.resume.set_seed", lambda *_: set_seed(0)),
        ("a parameter group left out of the optimizer", "fsdp", "a parameter is in no group",
         OPTIMIZERS, forget_vectors, (), "conv1.bias: AdamW, amsgrad=False"),
        ("the last layer in Muon's group", "ddp", "a parameter is in no group, or in the wrong",
         OPTIMIZERS, last_layer_in_muon, MUON, "fc2.weight: Muon, "),
        *((name, yaml, "a setting of optim is ignored, or a parameter is in the wrong group",
           OPTIMIZERS, with_setting(setting, value), tuple(arguments), f", {setting}={value}")
          for name, yaml, setting, value, *arguments in (
            ("weight decay on norms and biases", "fsdp", "weight_decay", 0.01),
            ("weight decay ignored", "cpu", "weight_decay", 0.0),
            ("betas ignored", "cpu", "betas", (0.9, 0.999), "--optim.betas=[0.8,0.9]"),
            ("another eps", "cpu", "eps", 1e-4),
            ("momentum ignored", "cpu", "momentum", 0, "--optim.name=sgd"),
            ("Nesterov's momentum", "cpu", "nesterov", True, "--optim.name=sgd"),
            ("Muon at a rate of its own", "cpu", "adjust_lr_fn", None, *MUON),
        )),
    ],
    "Steps": [
        ("the loss averaged per micro-batch, with ragged counts", "ddp", "a mean of means", STEP,
         weighted(lambda batch, number, counts: counts["targets"] / (batch.counts["targets"] * number * 2)),
         ("--micro_batch_size=4",)),
        ("a mean over the micro-batches", "cpu", "micro-batches are averaged",
         STEP, weighted(lambda _, number, __: 1 / number)),
        ("gradients summed, not averaged", "fsdp", "a sum that was not divided", STEP, weighted(lambda *_: 2.0)),
        ("gradients summed, with clipping", "ddp", "a sum that was not divided",
         STEP, weighted(lambda *_: 2.0), CLIPPED),
        ("all micro-batches forgotten but the last", "cpu", "micro-batches are averaged or forgotten",
         "train.gradient_sync", forget_earlier_ones),
        ("a mean loss", "cpu", MEAN, LOSS, take_mean),
        ("a mean loss, with clipping", "cpu", MEAN, LOSS, take_mean, CLIPPED),
        ("a loss that draws random numbers", "cpu",
         f"{MEAN}, or of other targets than Task.count counts, or an example's loss depends on its neighbours, or on "
         "random numbers that Task.loss draws", LOSS, add_noise),
        ("BatchNorm", "ddp", BATCH_NORM, BUILD, with_batch_norm(1.0)),
        ("BatchNorm that shows in gradients alone", "ddp", BATCH_NORM, BUILD, with_batch_norm(0.1)),
        ("BatchNorm that shows in gradients alone, with clipping", "ddp", BATCH_NORM,
         BUILD, with_batch_norm(0.1), CLIPPED),
        ("gradients not reduced for one parameter", "ddp", "a parameter that is not reduced",
         "src.training.run.prepare", prepare_without_a_bias, (), "fc1.bias"),
        ("gradients not cleared", "ddp", "gradients are not cleared",
         "train.step_if_finite", lambda _, optimizers, __: [optimizer.step() for optimizer in optimizers]),
        ("an epoch's last gradient forgotten", "cpu", "the gradients of an epoch's last step", STEP,
         in_last_step("train.local_gradients", lambda of, parameters: [g.zero_() for g in of(parameters)]), (),
         f", step {PER_EPOCH})"),
        ("an epoch's last update left out", "cpu", "a step that is not taken", STEP,
         in_last_step("train.step_if_finite", lambda _, optimizers, __: [each.zero_grad() for each in optimizers])),
        ("clipping before the gradients are scaled", "ddp", "clipped by a wrong norm",
         "train.grad_norm", lambda norm, *args: norm(*args) * 64, CLIPPED),
        ("clipping by one process's norm", "fsdp", "clipped by a wrong norm: it is one",
         "train.grad_norm", lambda _, __, gradients, ___: sum(g.double().square().sum() for g in gradients).sqrt(),
         CLIPPED),
        ("clipping that scales small gradients up", "ddp", "clipping scales small gradients up",
         "train.scale_and_clip_", lambda _, gradients, scale, norm, limit:
         torch._foreach_mul_(gradients, (limit / norm).to(gradients[0])), CLIPPED),
        ("the learning rate stepped once per process", "ddp", "the schedule has another pace or length",
         "train.lr_at", lambda lr_at, step, *rest: lr_at(2 * step, *rest)),
        ("a schedule that is longer by the number of processes", "ddp", "the schedule has another pace",
         "train.lr_at", lambda lr_at, step, optim, steps, per_epoch: lr_at(step, optim, 2 * steps, per_epoch)),
        ("a schedule that is a step ahead", "cpu", "the schedule is ahead of the steps",
         "train.lr_at", lambda lr_at, step, *rest: lr_at(step + 1, *rest)),
        ("another rate at the last step of each epoch", "cpu", "the schedule is ahead of the steps",
         STEP, in_last_step("train.lr_at", lambda lr_at, *args: 2 * lr_at(*args))),
        ("another rate at the first step of epoch 3", "cpu", "the schedule is ahead of the steps",
         "train.lr_at", lambda lr_at, step, *rest: lr_at(step, *rest) * (2 if step == 2 * PER_EPOCH else 1), (),
         f"step {2 * PER_EPOCH + 1}"),
        ("a buffer not synchronised", "fsdp", "a buffer that depends on each process's own examples",
         BUILD, build_with_a_buffer, (), "differing: seen, on process 1"),
    ],
    "Cost": [
        ("gradients reduced after each micro-batch", "ddp", "gradients are reduced after each micro-batch",
         "train.gradient_sync", lambda *_, **__: contextlib.nullcontext(), ("--micro_batch_size=2",)),
    ],
    "Evaluation": [
        ("an evaluation that is a mean of the batches' means", "ddp", MEAN_OF_MEANS, BATCHES, mean_of_means),
        ("dummies counted in the evaluation", "ddp", MEAN_OF_MEANS, BATCHES, count_dummies),
        ("an evaluation without the last batch", "cpu", "examples are left out",
         BATCHES, lambda evaluate, task, model, found, *rest: evaluate(task, model, list(found)[:-1], *rest)),
        ("dropout in the evaluation", "cpu", "dropout or similar is active",
         BATCHES, lambda evaluate, task, model, *rest: evaluate(task, model.train(), *rest)),
        ("an evaluation whose task returns a mean", "cpu", "Task.evaluate returns a mean", EVALUATE, evaluate_mean),
        ("an evaluation with a term over the batch", "ddp", DEPENDS, EVALUATE, add_batch_term),
        ("an evaluation whose task draws random numbers", "cpu", DRAWS, EVALUATE, add_noise),
        ("an evaluation whose task draws random numbers, on two", "ddp", DRAWS, EVALUATE, add_noise),
        ("other weights in the evaluation", "cpu", "the metrics are those of other weights",
         "train.evaluate", with_other_weights),
        *((name, yaml, cause, "train.evaluate", then(do), (), measured)
          for name, yaml, cause, measured, do in (
            ("an evaluation that leaves weights changed", "cpu", "evaluate() changes weights",
             "differing: weights", lambda run: multiply(run, 0.999)),
            ("an evaluation that clears the optimizer's state", "cpu", "evaluate() changes the optimizer",
             "differing: optimizer", lambda run: run.optimizers[0].state.clear()),
            ("an evaluation that draws the training's random numbers", "cpu", "evaluate() draws the training's random",
             "differing: random numbers", lambda _: torch.rand(())),
            ("an evaluation that leaves a layer's dropout off", "cpu", "evaluate() must end with model.train()",
             "differing: mode", lambda run: run.model.dropout1.eval()),
            ("an evaluation that leaves dropout off", "ddp", "evaluate() must end with model.train()",
             "differing: mode", lambda run: run.model.eval()),
        )),
    ],
    "Checkpoint": [
        ("a checkpoint that forgets the optimizer", "fsdp", "the checkpoint lacks the optimizer's state",
         "src.checkpoint.write.run_tensors", lambda run_tensors, model, _: run_tensors(model, [])),
        ("a checkpoint whose optimizer state is put back only where there is some", "fsdp",
         "the checkpoint lacks the optimizer", "src.checkpoint.tensors.create_optimizer_state", lambda *_: None),
        ("a checkpoint that forgets the random numbers", "ddp", "the checkpoint lacks the random",
         "src.checkpoint.resume.restore_random_state", lambda *_: None),
        ("a step added to a checkpoint's", "cpu", "the position in the data",
         "src.check.between_steps.load_checkpoint", load_a_step_on),
    ],
}  # fmt: skip
"""By the check that fails: name, yaml, cause, where, hook, arguments, measured."""
FAULTS = [Fault(name, yaml, check, *rest) for check, rows in ROWS.items() for name, yaml, *rest in rows]
