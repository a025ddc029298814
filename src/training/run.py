"""One run, as `build` in train.py has prepared it; its data and its model."""

import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import gather_object, set_seed
from torch import nn
from torch.optim import Optimizer

from src.config.config import Config
from src.config.errors import UserError, refuse
from src.distributed.accelerator import (
    HALF_PRECISION,
    TUNERS,
    Launch,
    context_parallel,
    local_main_process_first,
    machine_differences,
    prepare,
)
from src.tasks.base import Examples, FillWeights, Task, TaskState, num_weights, samples
from src.tasks.task_checks import require_right
from src.training.optim import Schedule
from src.training.progress import Progress
from src.training.state import Origin, ResumePoint
from src.training.transforms import transform


@dataclass(kw_only=True)
class Run:
    """What fit, train_step, evaluate and the checks work on."""

    config: Config
    accelerator: Accelerator
    launch: Launch
    store: Any
    """Where its checkpoints are: a Store of src/checkpoint/store.py."""
    resume: ResumePoint
    """The checkpoint that it continues from, if there is one."""
    model: nn.Module
    """The model as prepared: wrapped in DDP, or sharded."""
    optimizers: list[Optimizer]
    progress: Progress
    train_set: Examples
    eval_set: Examples
    origin: Origin
    """What it came from, which each checkpoint records."""
    facts: dict[str, Any]
    """Facts about model and data, for summary.json and the start-up summary."""

    def __post_init__(self) -> None:
        # bf16 has fp32's range: only fp16's smallest numbers are larger than some gradients
        if not self.is_fp16:
            self.progress.loss_scale = 1.0

    @property
    def task(self) -> Task:
        return self.config.task

    @property
    def device(self) -> torch.device:
        return self.accelerator.device

    @property
    def rank(self) -> int:
        return self.accelerator.process_index

    @property
    def world_size(self) -> int:
        return self.accelerator.num_processes

    @property
    def cp_size(self) -> int:
        """Return how many processes share each sequence."""
        return context_parallel(self.accelerator).size

    @property
    def data_rank(self) -> int:
        """Return which share of the examples is dealt to this process, and to those that it shares sequences with."""
        return self.rank // self.cp_size

    @property
    def data_size(self) -> int:
        """Return into how many shares the examples are dealt."""
        return self.world_size // self.cp_size

    @property
    def is_main(self) -> bool:
        return self.rank == 0

    @property
    def is_fp16(self) -> bool:
        return self.launch.precision == "fp16"

    @cached_property
    def parameters(self) -> list[nn.Parameter]:
        """Return the model's parameters; cached, as walking through the modules takes longer than a small update."""
        return list(self.model.parameters())

    @cached_property
    def steps_per_epoch(self) -> int:
        return self.config.steps_per_epoch(len(self.train_set))

    @cached_property
    def total_steps(self) -> int:
        return self.config.total_steps(len(self.train_set))

    @cached_property
    def schedule(self) -> Schedule:
        return Schedule(self.config.schedule_steps(len(self.train_set)), self.steps_per_epoch)

    def is_evaluation_due(self) -> bool:
        """Return whether an evaluation is due after this step and has not been made yet."""
        step = self.progress.step
        every = self.config.eval_every or self.steps_per_epoch
        is_due = step % every == 0 or step == self.total_steps
        # a checkpoint holds the evaluation of its step, so that a resume doesn't repeat it
        return is_due and step > self.progress.last_evaluated

    def is_save_due(self) -> bool:
        """Return whether a checkpoint is due after this step, even if it is not the last one."""
        if self.config.checkpoint.num_best > 0 and self.progress.step in self.progress.evaluations:
            return True  # what was just evaluated may be the best so far
        return self.progress.step % self.config.save_every == 0

    def is_read_due(self) -> bool:
        """Return whether the host needs this step's numbers now: until then, it doesn't wait for the device."""
        # In fp16 that is each step, as the next one's loss scale depends on this one's norm. Before an evaluation or a
        # save, so that too many bad steps end the run first, and a checkpoint's counters are complete.
        return (
            self.is_fp16
            or self.progress.step == self.total_steps
            or self.is_log_due()
            or self.is_evaluation_due()
            or self.is_save_due()
        )

    def is_log_due(self) -> bool:
        """Return whether an interval ends with this step."""
        return self.progress.step % self.config.log_every == 0


def begin_task(config: Config, launch: Launch) -> Config:
    """Return the settings with the task of this run. Raise a UserError if it asks for what the device cannot do."""
    state = TaskState(device=launch.device, dtype=HALF_PRECISION.get(launch.precision, torch.float32))
    return config.model_copy(update={"task": config.task.begin(state)})


def build_data(config: Config, accelerator: Accelerator) -> tuple[Examples, Examples]:
    """Return the training set and the evaluation set. Raise a UserError if the latter has no target, or the former
    makes the schedule too short."""
    task = config.task
    # the first process downloads and tokenizes, and the others find it done; one on each machine, as caches are on
    # their disks
    with local_main_process_first(accelerator):
        datasets = task.build_datasets()
        require_right(task, "build_datasets", datasets)
    train_set, eval_set = datasets
    refuse(config.optim.decay_errors(config.schedule_steps(len(train_set))))
    each = (task.count(task.collate(samples(eval_set, [index])))["targets"] for index in range(len(eval_set)))
    if not any(each):  # usually known from the first one
        raise UserError("the data to evaluate on have nothing to predict: Task.count finds no targets in any of them")
    task.state.cp = context_parallel(accelerator)  # from now on, a batch is this process's part of each example
    return train_set, eval_set


def fingerprints_of(task: Task, datasets: Sequence[Examples], accelerator: Accelerator) -> list[str]:
    """Return what identifies the datasets, computed by the first process of each machine; nothing on the others.
    Collective.

    Raises:
        UserError: a machine has other data than the first one; the same on all.
    """
    fingerprints: list[str] = []
    if accelerator.is_local_main_process:
        fingerprints = [task.fingerprint(dataset) for dataset in datasets]
    facts = dict(zip(("data to train on", "data to evaluate on"), fingerprints, strict=False))
    refuse(machine_differences(gather_object([(socket.gethostname(), facts)] if facts else [])))
    return fingerprints


def on_device(config: Config, dataset: Examples, device: torch.device) -> Examples:
    """Return the dataset in the device's memory, if it can be put there."""
    if config.num_workers > 0:
        # processes that load data can't read the device's memory
        return dataset
    # small data go to the device once and for all, so that no batch has to be copied
    to: Callable[[torch.device], Examples] | None = getattr(dataset, "to", None)
    return to(device) if to else dataset


def described(task: Task, train_set: Examples, eval_set: Examples) -> dict[str, dict[str, float]]:
    """Return what the task says of its data."""
    return {"train": task.describe("train", train_set), "eval": task.describe("eval", eval_set)}


def build_model(config: Config, accelerator: Accelerator, launch: Launch) -> tuple[nn.Module, dict[str, Any]]:
    """Return the model that the run trains, and facts about it by name."""
    model, facts, fill = new_model(config, accelerator.is_fsdp2)
    transform(model, config, accelerator)
    model = prepare(accelerator, model)
    if fill:
        # built without weights and sharded since: each process fills its own shards
        fill(model, torch.device("cpu") if launch.strategy.endswith("offload") else accelerator.device)
    return model, facts


def new_model(config: Config, is_sharded: bool = False) -> tuple[nn.Module, dict[str, Any], FillWeights | None]:
    """Return the task's model, the same on all processes, facts about it by name and, if it has no weights yet, what
    fills them in once it is sharded.

    `is_sharded` says whether FSDP will shard the model.
    """
    task = config.task
    fill = None
    # All processes use the same seed, and so get the same weights: DDP would broadcast those of process 0 over all
    # others; FSDP cuts each shard from its process's own.
    set_seed(config.seed)
    if is_sharded and (empty := task.build_empty_model()):
        model, fill = empty
    else:
        set_seed(config.seed)  # build_empty_model may have consumed random numbers
        model = task.build_model()
    tuned = task.state.notes + [setting for setting in ("compile", "cuda_graphs") if getattr(config, setting)]
    if task.state.device in TUNERS:
        tuned += TUNERS[task.state.device](model, is_sharded)
    parameters = list(model.parameters())
    facts = {
        "parameters": sum(map(num_weights, parameters)),
        "trained_parameters": sum(num_weights(p) for p in parameters if p.requires_grad),
        "tuned": tuned,
        "built_whole": is_sharded and not fill,
    }
    return model, facts, fill
