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
PER_EPOCH = 90
"""Steps of an epoch in tests/check/examine.py."""


@dataclass
class Fault:
    """A fault under a yaml (some only show with shards, others only with replicas), the check that fails first and what
    it says: the cause; and where a hook is put in place of a function, by its module or class."""

    name: str
    yaml: str
    fails: str
    says: str
    where: str
    hook: Hook
    arguments: tuple[str, ...] = ()


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


# -------------------------------------------------------------------------------------------------------- a checkpoint
def load_a_step_on(load: Hook, run: Any) -> None:
    load(run)
    run.progress.step += 1


EPOCH_SEED, EPOCH_ORDER, LOAD = (f"src.training.batches.{name}" for name in ("epoch_seed", "epoch_order", "_load"))
FAULTS = [
    Fault("every process reads the same shard", "ddp", "Data", "719 left out, 719 too often, on process 1",
          EPOCH_ORDER, lambda order, run, *rest: np.repeat(order(run, *rest)[:: run.world_size], run.world_size)),
    Fault("set_epoch forgotten", "fsdp", "Data", "set_epoch was forgotten",
          EPOCH_SEED, lambda seed, config, epoch, *of: seed(config, epoch if of else 0, *of)),
    Fault("one sample dropped", "ddp", "Data", "1 left out",
          EPOCH_ORDER, lambda order, *args: order(*args)[:-1]),
    Fault("one sample doubled in evaluation", "ddp", "Data", "0 left out, 1 too often",
          LOAD, lambda load, run, dataset, order, *rest:
          load(run, dataset, np.append(order, 0) if dataset is run.eval_set else order, *rest)),
    Fault("a process without an evaluation batch", "ddp", "Data", "a process has fewer batches than others",
          LOAD, load_on_the_first),
    Fault("an epoch that begins anew where a run goes on", "ddp", "Data", "examples that it has seen",
          EPOCH_ORDER, lambda order, run, epoch, done: order(run, epoch, 0)),
    Fault("an augmentation that depends on the process", "ddp", "Data", "depends on the process",
          EPOCH_SEED, lambda seed, config, epoch, *of: seed(config, epoch, *(part + rank() for part in of)), ROTATED),
    Fault("each process has data of its own", "ddp", "Data", "build_datasets makes other data",
          "src.tasks.mnist.bundled_digits", shuffled_anew),
    Fault("an order that repeats from epoch 3 on", "cpu", "Data", "an earlier one comes again",
          EPOCH_SEED, lambda seed, config, epoch, *of: seed(config, epoch if of else epoch % 2, *of)),
    Fault("an augmentation that is the same from epoch 3 on", "cpu", "Data", "an augmentation depends on",
          EPOCH_SEED, lambda seed, config, epoch, *of: seed(config, min(epoch, 1) if of else epoch, *of), ROTATED),
    Fault("an augmentation without the seed", "cpu", "Data", "an augmentation depends on",
          EPOCH_SEED, lambda seed, config, epoch, *of: [0, epoch, *of] if of else seed(config, epoch),
          (*ROTATED, "--seed=1")),

    Fault("the loss averaged per micro-batch, with ragged counts", "ddp", "Steps", "a mean of means",
          "train.train_step",
          weighted(lambda batch, number, counts: counts["targets"] / (batch.counts["targets"] * number * 2)),
          ("--micro_batch_size=4",)),
    Fault("a mean over the micro-batches", "cpu", "Steps", "a mean of means",
          "train.train_step", weighted(lambda _, number, __: 1 / number)),
    Fault("gradients summed, not averaged", "fsdp", "Steps", "a sum that was not divided",
          "train.train_step", weighted(lambda *_: 2.0)),
    Fault("all micro-batches forgotten but the last", "cpu", "Steps", "a mean of means",
          "train.reducing", forgetting_earlier_ones),
    Fault("a mean loss", "cpu", "Steps", "Task.loss returns a mean in place of the sum", "src.tasks.mnist.Mnist.loss",
          lambda loss, self, model, batch: loss(self, model, batch) / len(batch["labels"])),
    Fault("gradients not reduced for one parameter", "ddp", "Steps", "fc1.bias",
          "src.training.run.prepare", prepare_without_a_bias),
    Fault("gradients not cleared", "ddp", "Steps", "not the gradient of the whole batch's",
          "train.step_if_finite", lambda _, optimizers, __: [optimizer.step() for optimizer in optimizers]),
    Fault("gradients reduced after each micro-batch", "ddp", "Cost", "reduced after each micro-batch",
          "train.reducing", lambda *_, **__: contextlib.nullcontext(), ("--micro_batch_size=2",)),
    Fault("clipping before the gradients are scaled", "ddp", "Steps", "taken before the gradients were scaled",
          "train.grad_norm", lambda norm, *args: norm(*args) * 64, CLIPPED),
    Fault("clipping by one process's norm", "fsdp", "Steps", "the norm is one process's", "train.grad_norm",
          lambda _, __, gradients, ___: sum(g.double().square().sum() for g in gradients).sqrt(), CLIPPED),
    Fault("clipping that scales small gradients up", "ddp", "Steps", "clipping that scales small gradients up",
          "train.scale_and_clip_",
          lambda _, gradients, scale, norm, most: torch._foreach_mul_(gradients, (most / norm).to(gradients[0])),
          CLIPPED),
    Fault("an epoch's last gradient forgotten", "cpu", "Steps", f", step {PER_EPOCH})", "train.train_step",
          in_the_epochs_last_step("train.local_gradients", lambda of, parameters: [g.zero_() for g in of(parameters)])),

    Fault("a parameter group left out of the optimizer", "fsdp", "Same start", "conv1.bias: AdamW, amsgrad=False",
          "train.build_optimizers", without_vectors),
    Fault("the last layer in Muon's group", "ddp", "Same start", "fc2.weight: Muon, ",
          "train.build_optimizers", last_layer_in_muon, ("--optim.name=muon",)),
    Fault("the learning rate stepped once per process", "ddp", "Steps", "a prepared scheduler steps once per process",
          "train.lr_at", lambda lr_at, step, *rest: lr_at(2 * step, *rest)),
    Fault("a schedule that is longer by the number of processes", "ddp", "Steps", "another form or length",
          "src.training.run.Schedule", lambda schedule, steps, per_epoch: schedule(2 * steps, per_epoch)),
    Fault("a schedule that is a step ahead", "cpu", "Steps", "the schedule is ahead of the steps",
          "train.lr_at", lambda lr_at, step, *rest: lr_at(step + 1, *rest)),
    Fault("another rate at the last step of each epoch", "cpu", "Steps", "the schedule is ahead of the steps",
          "train.train_step", in_the_epochs_last_step("train.lr_at", lambda lr_at, *args: 2 * lr_at(*args))),
    Fault("another rate at the first step of epoch 3", "cpu", "Steps", f"step {2 * PER_EPOCH + 1}",
          "train.lr_at", lambda lr_at, step, *rest: lr_at(step, *rest) * (2 if step == 2 * PER_EPOCH else 1)),
    Fault("an epoch's last update left out", "cpu", "Steps", "or a step that is not taken", "train.train_step",
          in_the_epochs_last_step("train.step_if_finite", lambda _, all, __: [each.zero_grad() for each in all])),
    Fault("a buffer not synchronised", "fsdp", "Steps", "differing: seen, on process 1",
          "src.tasks.mnist.MnistCnn.__init__", build_with_a_buffer),

    Fault("only the root wrapped", "fsdp", "Launch", "FSDP of the root alone x 2",
          "src.training.run.prepare", prepare_the_root_alone),
    Fault("a process seeded differently at start", "fsdp", "Same start",
          "differing: conv1.weight, conv1.bias, conv2.weight", "src.training.run.new_model",
          lambda build, config, *rest: build(config.model_copy(update={"seed": config.seed + rank()}), *rest)),
    Fault("the same dropout on every process", "ddp", "Same start", "the same units on every process",
          "src.checkpoint.resume.set_seed", lambda *_: set_seed(0)),

    Fault("an evaluation that is a mean of the batches' means", "ddp", "Evaluation",
          "a mean of each process's or each batch's", "train.evaluate_batches", mean_of_means),
    Fault("stand-ins counted in the evaluation", "ddp", "Evaluation", "counted padding",
          "train.evaluate_batches", with_stand_ins),
    Fault("an evaluation without the last batch", "cpu", "Evaluation", "examples left out", "train.evaluate_batches",
          lambda evaluate, task, model, found, *rest: evaluate(task, model, list(found)[:-1], *rest)),
    Fault("dropout in the evaluation", "cpu", "Evaluation", "dropout and the like are on", "train.evaluate_batches",
          lambda evaluate, task, model, *rest: evaluate(task, model.train(), *rest)),
    Fault("other weights in the evaluation", "cpu", "Evaluation", "other weights, such as an average",
          "train.evaluate", with_other_weights),
    Fault("an evaluation that leaves weights changed", "cpu", "Evaluation", "differing: weights",
          "train.evaluate", after_evaluation(lambda run: multiply(run, 0.999))),
    Fault("an evaluation that clears the optimizer's state", "cpu", "Evaluation", "differing: optimizer",
          "train.evaluate", after_evaluation(lambda run: run.optimizers[0].state.clear())),
    Fault("an evaluation that draws the training's random numbers", "cpu", "Evaluation", "differing: random numbers",
          "train.evaluate", after_evaluation(lambda _: torch.rand(()))),
    Fault("an evaluation that leaves a layer's dropout off", "cpu", "Evaluation", "differing: mode",
          "train.evaluate", after_evaluation(lambda run: run.model.dropout1.eval())),
    Fault("an evaluation that leaves dropout off", "ddp", "Evaluation", "must end with model.train()",
          "train.evaluate", after_evaluation(lambda run: run.model.eval())),

    Fault("a checkpoint that forgets the optimizer", "fsdp", "Checkpoint", "the optimizer's state",
          "src.checkpoint.write.run_tensors", lambda run_tensors, model, _: run_tensors(model, [])),
    Fault("a checkpoint whose optimizer state is put back only where there is some", "fsdp", "Checkpoint",
          "the optimizer's state", "src.checkpoint.tensors.create_optimizer_state", lambda *_: None),
    Fault("a checkpoint that forgets the random numbers", "ddp", "Checkpoint", "the random numbers",
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
    says = f", {setting}={value}"
    FAULTS.append(Fault(name, yaml, "Same start", says, "train.build_optimizers", hook, tuple(arguments)))
