"""The run that `build` in train.py puts together, and its data and model."""

import socket
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import broadcast_object_list, gather_object, set_seed
from torch import nn
from torch.optim import Optimizer

from src.config.config import Config
from src.config.errors import UserError, raise_if_any
from src.config.terminal import say
from src.distributed.accelerator import (
    COMPUTE_DTYPES,
    TUNERS,
    RunSetup,
    context_parallel,
    local_main_process_first,
    machine_differences,
    prepare,
)
from src.distributed.remarks import strategy_remarks
from src.tasks.base import Examples, FillWeights, Task, TaskState, num_weights, samples
from src.tasks.task_checks import require_right
from src.training.progress import Progress
from src.training.rates import freeze
from src.training.state import ResumePoint, RunInputs
from src.training.transforms import checkpoint_and_compile

ADJUSTMENTS: list[Callable[[nn.Module, Config[Task]], list[str]]] = [
    # functions that change a model in place as soon as the task has built it, and return what the user should know
    freeze,
]
TRANSFORMS: list[Callable[[nn.Module, Config[Task], Accelerator], None]] = [
    # functions that change a model in place after the task has built it and before it is wrapped
    checkpoint_and_compile,
]
REMARKS: list[Callable[[Accelerator, nn.Module], Iterable[str]]] = [
    # functions that find what the user should know about a wrapped model
    strategy_remarks,
]


@dataclass(kw_only=True)
class Run:
    """Everything that fit, train_step, evaluate and the checks work on."""

    config: Config[Task]
    accelerator: Accelerator
    launch: RunSetup
    resume: ResumePoint
    """Where it resumes, if it does."""
    model: nn.Module
    """The model as prepared: wrapped in DDP, or sharded."""
    optimizers: list[Optimizer]
    progress: Progress
    train_set: Examples
    eval_set: Examples
    origin: RunInputs
    """The inputs of the run, which each checkpoint saves."""
    metadata: dict[str, Any]
    """Facts about model and data, for summary.json and the startup summary."""

    def __post_init__(self) -> None:
        # only fp16 needs loss scaling: bf16 has fp32's range
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
        """Return the number of processes that share each sequence."""
        return context_parallel(self.accelerator).size

    @property
    def data_rank(self) -> int:
        """Return which shard of the examples this process gets. Processes that share sequences get the same one."""
        return self.rank // self.cp_size

    @property
    def data_size(self) -> int:
        """Return the number of shards into which examples are dealt."""
        return self.world_size // self.cp_size

    @property
    def is_main(self) -> bool:
        return self.rank == 0

    @property
    def is_fp16(self) -> bool:
        return self.launch.precision == "fp16"

    @cached_property
    def parameters(self) -> list[nn.Parameter]:
        """Return the model's parameters; cached, as iterating over the modules takes longer than a small update."""
        return list(self.model.parameters())

    @cached_property
    def steps_per_epoch(self) -> int:
        return self.config.steps_per_epoch(len(self.train_set))

    @cached_property
    def total_steps(self) -> int:
        return self.config.total_steps(len(self.train_set))

    @cached_property
    def schedule(self) -> tuple[int, int]:
        """Return what the learning rate depends on besides its settings: the optimizer steps that the schedule spans,
        and those of an epoch."""
        return self.config.schedule_steps(len(self.train_set)), self.steps_per_epoch

    def tell(self, *lines: str) -> None:
        """Print lines, on the main process."""
        if self.is_main:
            say(*lines)

    def is_evaluation_due(self) -> bool:
        """Return whether an evaluation is due after this step and has not been done yet."""
        step = self.progress.step
        every = self.config.eval_every or self.steps_per_epoch
        is_due = step % every == 0 or step == self.total_steps
        # a checkpoint holds its step's evaluation, so that a resume doesn't repeat it
        return is_due and step > self.progress.last_evaluated

    def is_save_due(self) -> bool:
        """Return whether a checkpoint is due after this step, other than at the run's end."""
        if self.config.checkpoint.num_best > 0 and self.progress.step in self.progress.evaluations:
            return True  # this evaluation may be the best so far
        return self.progress.step % self.config.save_every == 0

    def needs_sync(self) -> bool:
        """Return whether the host needs this step's results now, and has to wait for the device."""
        # In fp16 always, as the next loss scale depends on this norm. Before an evaluation or a save, as after the last
        # step, so that too many bad steps end the run first, and a checkpoint's counters are complete.
        return self.is_fp16 or self.is_log_due() or self.is_evaluation_due() or self.is_save_due()

    def is_log_due(self) -> bool:
        """Return whether a logging interval ends with this step."""
        return self.progress.step % self.config.log_every == 0

    def is_logged(self) -> bool:
        """Return whether this step is logged: at the end of an interval or of the run."""
        return self.is_log_due() or self.progress.step == self.total_steps


def begin_task(config: Config[Task], launch: RunSetup, resume: ResumePoint) -> Config[Task]:
    """Return the settings with the task of this run. Raise a UserError if it asks for what the device cannot do.
    Collective."""
    dtype = COMPUTE_DTYPES.get(launch.precision, torch.float32)
    state = TaskState(launch.device, dtype, is_check=config.mode == "check")
    kept = resume.state.origin.data_state if resume.state else {}
    (state.date,) = broadcast_object_list([kept.get("date", state.date)])
    return config.model_copy(update={"task": config.task.bind(state)})


def build_data(config: Config[Task], accelerator: Accelerator) -> tuple[Examples, Examples]:
    """Return the training set and the evaluation set. Raise a UserError if the evaluation set has no targets, or the
    training set is empty or makes the run too short for its settings."""
    task = config.task
    task.state.cp = context_parallel(accelerator)
    # the first process of each machine downloads and tokenizes, and the others read its cache
    with local_main_process_first(accelerator):
        datasets = task.build_datasets()
        require_right(task, "build_datasets", datasets)
        _ = task.eval_sets
    train_set, eval_set = datasets
    if not len(train_set):
        raise UserError("the training set is empty")
    raise_if_any(config.length_errors(len(train_set)))
    each = (task.count(task.collate(samples(eval_set, [index])))["targets"] for index in range(len(eval_set)))
    # the first example usually has one; where processes share sequences, their parts of one may have none
    if task.state.cp.size == 1 and not any(each):
        raise UserError("the evaluation set has nothing to predict: Task.count finds no targets in it")
    return train_set, eval_set


def fingerprints_of(task: Task, datasets: tuple[Examples, Examples], accelerator: Accelerator) -> list[str]:
    """Return the datasets' fingerprints on the first process of each machine, and an empty list on the others.
    Collective.

    Raises:
        UserError: a machine has other data than the first one; raised on all processes.
    """
    fingerprints: list[str] = []
    if accelerator.is_local_main_process:
        fingerprints = [task.fingerprint(dataset) for dataset in datasets]
        fingerprints[-1] += "".join(map(task.fingerprint, task.eval_sets.values()))
    facts = dict(zip(("training data", "evaluation data"), fingerprints, strict=False))
    raise_if_any(machine_differences(gather_object([(socket.gethostname(), facts)] if facts else [])))
    return fingerprints


def on_device(config: Config, dataset: Examples, device: torch.device) -> Examples:
    """Return the dataset in the device's memory if it can be put there."""
    # a small dataset is copied to the device once, so that batches don't have to be
    to: Any = getattr(dataset, "to", None)
    # worker processes, which a copy may lack, can't read the device's memory
    return dataset if to is None or getattr(config, "num_workers", False) else to(device)


def prepare_model(config: Config[Task], accelerator: Accelerator, launch: RunSetup) -> tuple[nn.Module, dict[str, Any]]:
    """Return the task's model, ready to train (compiled, wrapped in DDP or sharded), and facts about it by name."""
    model, metadata, fill = new_model(config, accelerator.is_fsdp2)
    for transform in TRANSFORMS:
        transform(model, config, accelerator)
    model = prepare(accelerator, model)
    metadata["remarks"] += [line for remarks in REMARKS for line in remarks(accelerator, model)]
    if fill:
        # built without weights, then sharded: each process loads only its own shards
        fill(model, torch.device("cpu") if launch.strategy.endswith("offload") else accelerator.device)
    return model, metadata


def require_rows(run: Run) -> None:
    """Raise a UserError if an epoch's last micro-batch leaves a process a single row, and the model has a BatchNorm
    that needs several. Torch would say so at the end of the epoch."""
    chunk_size = run.config.forward_batch_size(run.data_size) * run.data_size
    num_left = len(run.train_set) % chunk_size
    # a process without any computes on a dummy
    is_single = 0 < num_left < 2 * run.data_size and run.total_steps >= run.steps_per_epoch
    # the others normalize over the pixels of a row too
    if is_single and any(isinstance(layer, nn.BatchNorm1d) and layer.training for layer in run.model.modules()):
        raise UserError(
            "BatchNorm cannot normalize a single row, and the end of an epoch leaves one to a process: choose another "
            "global_batch_size or micro_batch_size"
        )


def new_model(config: Config[Task], is_sharded: bool = False) -> tuple[nn.Module, dict[str, Any], FillWeights | None]:
    """Return the task's model, the same on all processes, facts about it and, if it has no weights yet, the function
    that fills them in once it is sharded. `is_sharded`: FSDP will shard it."""
    task = config.task
    fill = None
    # All processes use the same seed and so get the same weights: DDP would broadcast those of process 0, but FSDP cuts
    # each process's shard from its own copy.
    set_seed(config.seed)
    if is_sharded and (empty := task.build_empty_model()):
        model, fill = empty
    else:
        set_seed(config.seed)  # build_empty_model may have consumed random numbers
        model = task.build_model()
    remarks = [line for adjust in ADJUSTMENTS for line in adjust(model, config)]
    # a copy of the project may lack such a setting
    optimizations = task.state.optimizations + [
        setting for setting in ("compile", "cuda_graphs") if getattr(config, setting, False)
    ]
    if task.state.device in TUNERS:
        optimizations += TUNERS[task.state.device](model, is_sharded)
    parameters = list(model.parameters())
    metadata = {
        "parameters": sum(map(num_weights, parameters)),
        "trained_parameters": sum(num_weights(p) for p in parameters if p.requires_grad),
        "optimizations": optimizations,
        "remarks": task.state.remarks + remarks,
        "built_whole": is_sharded and not fill,
    }
    return model, metadata, fill
