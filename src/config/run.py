"""The settings that every run has."""

import math
import re
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, NonNegativeInt, PositiveFloat, PositiveInt

from src.config.environment import LaunchEnv, processes
from src.config.groups import Checkpoint, EarlyStopping, Optim, TaskSettings
from src.config.settings import Reopens, ResumeSafe, SafeReopens, Settings, nearest
from src.config.terminal import CONTROL


class RunSettings(Settings):
    """Settings that every run has."""

    run_name: ResumeSafe[str] = ""
    """Name of the run and of its folders, such as chat or group/chat; empty: the task's name."""
    output_dir: ResumeSafe[Annotated[str, Field(min_length=1)]] = "runs/{run_name}"
    """Output folder of the run."""
    seed: Annotated[NonNegativeInt, Field(lt=2**32)] = 0
    """Seed of initial weights, data order, augmentation and dropout."""
    epochs: Reopens[PositiveInt | None] = 10
    """Passes over the training data; the learning-rate schedule spans them."""
    max_steps: Reopens[PositiveInt | None] = None
    """Optimizer steps, overriding epochs. If fewer, the same curve is cut short; if more, the schedule stretches."""
    global_batch_size: PositiveInt = 64
    """Examples per optimizer step, over all processes and accumulated micro-batches."""
    micro_batch_size: ResumeSafe[PositiveInt | None] = None
    """Examples per forward pass of each process; null: global_batch_size / processes, without accumulation."""
    fsdp_reduce_each_micro_batch: ResumeSafe[bool] = True
    """Under FSDP, reduce gradients after each micro-batch; false: only after the last, which communicates less but
    holds full fp32 gradients on each rank."""
    ddp_comm_hook: ResumeSafe[Literal["bf16", "fp16"] | None] = None
    """Dtype that DDP all-reduces gradients in, to spare slow networks; null: their own."""
    log_every: ResumeSafe[PositiveInt] = 50
    """Steps between logs of the training metrics."""
    eval_every: ResumeSafe[PositiveInt | None] = None
    """Steps between evaluations; null: one per epoch. There is always one after the last step."""
    save_every: ResumeSafe[PositiveInt] = 500
    """Steps between checkpoints. There is always one after the last step."""
    resume: ResumeSafe[str] = "auto"
    """auto: resume from the newest valid checkpoint in output_dir, if there is one; never: refuse an output_dir that
    holds a run; or start from any checkpoint, given as its folder."""
    max_hours: ResumeSafe[PositiveFloat | None] = None
    """Save and stop after this many hours, so that the run can be resumed; null: no limit."""
    max_bad_steps: ResumeSafe[PositiveInt] = 10
    """Fail after this many consecutive non-finite steps."""
    timeout_minutes: ResumeSafe[PositiveFloat] = 30.0
    """Collective timeout, in minutes: the run fails if a process hangs for longer. Until the first step is done, it is
    at least 30, for loading and compiling."""
    dry_run: ResumeSafe[bool] = False
    """Do everything up to the first step, write nothing, and print what the run would do; `--dry-run` is enough."""
    task: TaskSettings
    """Settings of the task chosen by `task.name`."""
    optim: Optim = Optim()
    checkpoint: ResumeSafe[Checkpoint] = Checkpoint()
    early_stopping: SafeReopens[EarlyStopping] = EarlyStopping()

    @property
    def folder_name(self) -> str:
        """Return what {run_name} stands for."""
        return self.run_name

    @property
    def folder(self) -> Path:
        """Return output_dir with run_name filled in."""
        return Path(self.output_dir.replace("{run_name}", self.folder_name))

    @property
    def mode(self) -> str:
        """Return what to do: `train`, or a mode of src/parts.py that is asked for instead."""
        return "dry_run" if self.dry_run else "train"

    @property
    def saves(self) -> bool:
        """Return whether the run trains, logs metrics and saves checkpoints."""
        return self.mode == "train"

    def steps_per_epoch(self, examples: int) -> int:
        """Return the optimizer steps per epoch, including one for a smaller last batch."""
        return math.ceil(examples / self.global_batch_size)

    def total_steps(self, examples: int) -> int:
        """Return the optimizer steps to take, with this many examples per epoch."""
        return self.max_steps or self.schedule_steps(examples)

    def schedule_steps(self, examples: int) -> int:
        """Return the optimizer steps that the learning-rate schedule spans, with this many examples per epoch."""
        return max(self.max_steps or 0, (self.epochs or 0) * self.steps_per_epoch(examples))

    def forward_batch_size(self, data_size: int) -> int:
        """Return the examples per forward pass of a process, with the data split over `data_size` processes."""
        return self.micro_batch_size or self.global_batch_size // data_size

    def gradient_accumulation_steps(self, data_size: int) -> int:
        """Return the micro-batches per optimizer step, with the data split over `data_size` processes."""
        return self.global_batch_size // (self.forward_batch_size(data_size) * data_size)

    def validation_errors(self) -> Iterator[str]:
        yield from super().validation_errors()
        size, micro, launch = self.global_batch_size, self.micro_batch_size, LaunchEnv()
        unit = (micro or 1) * max(1, launch.world_size // launch.cp_size)
        if size % unit:
            split_over = processes(launch.world_size, launch.cp_size)
            product = f"{micro} (micro_batch_size) x {split_over} = {unit}" if micro else split_over
            below = size // unit * unit
            sizes = f"{below} or {below + unit}".removeprefix("0 or ")
            yield f"global_batch_size={size}: not a multiple of {product}; nearest that are: global_batch_size={sizes}"
        if re.search(rf"^/|(^|/)\.\.(/|$)|{CONTROL}", self.run_name):
            yield f"run_name={self.run_name}: leads out of its folder, or has control characters"
        if not (self.epochs or self.max_steps):
            yield "epochs and max_steps are both null: set one of them"
        if self.dry_run and self.mode != "dry_run":
            yield f"--dry-run and --{self.mode} cannot be combined"
        yield from self.optim.decay_errors(math.inf if self.epochs else self.max_steps or math.inf)
        if self.task.metric_names is not None:
            known = [f"eval/{name}" for name in ("loss", "examples", *self.task.metric_names)]
            further = getattr(self.task, "eval_datasets", ())
            known += [f"{metric}_{name}" for name in further for metric in ("eval/loss", "eval/accuracy")]
            yield from self.metric_errors(known)

    def length_errors(self, examples: int) -> Iterator[str]:
        """Yield an error line for each setting that does not fit a run with this many examples per epoch."""
        yield from self.optim.decay_errors(self.schedule_steps(examples))

    def metric_errors(self, names: Collection[str]) -> list[str]:
        """Return an error line for each metric in the settings that is not among the `names` of an evaluation's
        results."""
        chosen = {"checkpoint": self.checkpoint.metric, "early_stopping": self.early_stopping.metric}
        says = "the evaluation has no such metric"
        return [
            f"{setting}.metric={name}: {says}{nearest(name, list(names))} ({', '.join(names)})"
            for setting, name in chosen.items()
            if name is not None and name not in names
        ]
