"""The settings of a run and where they come from: the defaults in this file < yaml files < the command line."""

import math
import os
import re
import sys
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from pkgutil import resolve_name
from typing import Annotated, Any, Literal

from huggingface_hub import constants, get_token
from pydantic import Field, NonNegativeInt, PositiveFloat, PositiveInt, ValidationError, create_model

from src.config.environment import cp_size, leftovers, processes, world_size
from src.config.errors import explained, refuse
from src.config.groups import Checkpoint, EarlyStopping, Optim
from src.config.settings import (
    Length,
    ResumeSafe,
    SafeReopens,
    Settings,
    describe,
    nearest,
    read_arguments,
    validate,
)
from src.config.terminal import say
from src.config.tracking import Wandb

USAGE = """\
accelerate launch --config_file accelerate_configs/ddp.yaml train.py [--config=FILE.yaml]... [--key.sub=value]...

Settings, with their defaults (a yaml given by --config overrides them, the command line overrides both).
The task's own are shown for the chosen one: --task.name={tasks}
"""
Tracker = Literal[  # room: trackers wandb
    "wandb",  # room: wandb
    "trackio",  # room: trackers
    "tensorboard",  # room: trackers
]


class Config(Settings):
    """All settings of a run."""

    run_name: ResumeSafe[str] = ""
    """Name of the run; empty: the task's name."""
    output_dir: ResumeSafe[Annotated[str, Field(min_length=1)]] = "runs/{run_name}"
    """Folder that the run writes into."""
    seed: Annotated[NonNegativeInt, Field(lt=2**32)] = 0
    """Seed of the initial weights, the order of the data, the augmentation and the dropout."""
    epochs: Length[PositiveInt | None] = 10
    """Passes over the training data, which the learning-rate schedule spans."""
    max_steps: Length[PositiveInt | None] = None
    """Optimizer steps to take, overriding epochs. Fewer: the same curve, cut short. More: the schedule stretches."""
    global_batch_size: PositiveInt = 64
    """Examples per optimizer step, over all processes and accumulated micro-batches."""
    micro_batch_size: ResumeSafe[PositiveInt | None] = None
    """Examples per forward pass of a process; null: global_batch_size / processes, without accumulation."""
    activation_checkpointing: ResumeSafe[bool] = False  # room: compile
    """Recompute activations in the backward pass instead of keeping them: less memory, a third more time."""
    compile: ResumeSafe[bool] = False  # room: compile
    """Compile the model, a transformer block by block. The first steps then take a minute."""
    cuda_graphs: ResumeSafe[bool] = False  # room: cuda_graphs
    """Record a step, and launch its kernels all at once: for small models, on one NVIDIA GPU."""
    fsdp_reduce_each_micro_batch: ResumeSafe[bool] = True
    """Reduce gradients after each micro-batch; false: after the last, as DDP does, which takes the memory of all of
    them on each process, in fp32, but exchanges less."""
    ddp_comm_hook: ResumeSafe[Literal["bf16", "fp16"] | None] = None
    """Type that DDP casts gradients to while it sums them over the processes, for slow connections; null: none."""
    num_workers: ResumeSafe[NonNegativeInt] = 0  # room: workers
    """Processes that load data for each training process; 0: it loads the data itself."""
    profile_steps: ResumeSafe[str | None] = None  # room: performance
    """The first and the last step to profile, as 10:15, into output_dir/profile; null: none."""
    log_every: ResumeSafe[PositiveInt] = 50
    """Steps between records of the training metrics."""
    eval_every: ResumeSafe[PositiveInt | None] = None
    """Steps between evaluations; null: at the end of each epoch. The last step is always followed by one."""
    save_every: ResumeSafe[PositiveInt] = 500
    """Steps between checkpoints. The last step is always followed by one."""
    resume: ResumeSafe[str] = "auto"
    """auto: from the newest valid checkpoint in output_dir, or from the start if there is no run; never: refuse an
    output_dir that holds a run; or a checkpoint's folder, even another run's, or wandb:entity/project/name:alias."""
    max_hours: ResumeSafe[PositiveFloat | None] = None
    """Hours after which to save and stop, so that the run can be continued; null: no limit."""
    max_bad_steps: ResumeSafe[PositiveInt] = 10
    """Steps in a row skipped because of gradients that are not finite, after which the run fails."""
    timeout_minutes: ResumeSafe[PositiveFloat] = 30.0
    """Minutes that a process waits for the others in an exchange; then one counts as hung, and the run fails."""
    trackers: ResumeSafe[list[Tracker]] = [  # room: trackers wandb
        "wandb",  # room: wandb
    ]
    """What records the run besides metrics.jsonl: wandb, trackio, tensorboard."""
    check: ResumeSafe[bool] = False  # room: check
    """Check whether this run would be right, instead of training; `--check` is enough: docs/check.md."""
    dry_run: ResumeSafe[bool] = False  # room: dry_run
    """Do all up to the first step, write nothing, and say what the run would do; `--dry-run` alone is enough."""
    push_to_hub: SafeReopens[str | None] = None  # room: hub
    """Repository on the Hub, USER/NAME, that the model is uploaded to at the end; private if new; null: none."""
    task: Any
    """The settings of the task that `task.name` picks: a src.tasks.base.Task."""
    optim: Optim = Optim()
    checkpoint: ResumeSafe[Checkpoint] = Checkpoint()
    early_stopping: SafeReopens[EarlyStopping] = EarlyStopping()  # room: best
    wandb: ResumeSafe[Wandb] = Wandb()  # room: wandb

    def model_post_init(self, _: Any) -> None:
        self.run_name = self.run_name or self.task.name

    @property
    def folder(self) -> Path:
        """Return output_dir, filled in."""
        name = self.run_name
        if "WANDB_SWEEP_ID" in os.environ:  # room: wandb
            # `wandb agent` repeats one command: each trial of a sweep gets a folder of its own
            name += f"-{os.environ.get('WANDB_RUN_ID')}"
        return Path(self.output_dir.replace("{run_name}", name))

    @property
    def saves(self) -> bool:
        """Return whether the run writes into its folder."""
        is_trial = False
        is_trial |= self.check  # room: check
        is_trial |= self.dry_run  # room: dry_run
        return not is_trial

    def steps_per_epoch(self, examples: int) -> int:
        """Return the optimizer steps of an epoch of so many examples: its smaller last batch is a step as well."""
        return math.ceil(examples / self.global_batch_size)

    def steps(self, steps_per_epoch: int) -> tuple[int, int]:
        """Return the optimizer steps to take, and those that the learning-rate schedule spans."""
        planned = (self.epochs or 0) * steps_per_epoch
        total = self.max_steps or planned
        return total, max(total, planned)

    def micro_batch(self, data_size: int) -> int:
        """Return the examples per forward pass of a process, where the data are dealt to `data_size` of them."""
        return self.micro_batch_size or self.global_batch_size // data_size

    def accumulation(self, data_size: int) -> int:
        """Return the micro-batches per optimizer step of a process, where the data are dealt to `data_size` of them."""
        return self.global_batch_size // (self.micro_batch(data_size) * data_size)


def load_config(
    argv: list[str],
    tasks: Mapping[str, str],
    also: Callable[[Config], Iterator[str]] | None = None,  # room: safeguards
    fetch: Callable[[Config, list[str]], set[str]] | None = None,  # room: wandb
) -> Config:
    """Read the settings; if `argv` asks for --help, print them and exit with code 0.

    Args:
        tasks: where each task's class is, by name.
        also: yields what else is wrong with settings whose places in the file system are known, one line each.
        fetch: replaces what settings name elsewhere by what it has downloaded; appends mistakes, and returns the names
            of the settings that it could not replace.

    Raises:
        UserError: the settings have mistakes; all of them, one per line.
    """
    wants_help = "--help" in argv or "-h" in argv
    mistakes = [*leftovers()]
    values, written = read_arguments([a for a in argv if a not in ("--help", "-h")], mistakes)

    name = str(values.get("task.name", "mnist"))
    if name not in tasks:
        mistakes.append(f"{written['task.name']}: no such task{nearest(name, list(tasks))} ({', '.join(tasks)})")
        values = {key: value for key, value in values.items() if not key.startswith("task.")}
        name = "mnist"
    config_class = _config_class(name, tasks)
    if wants_help:
        say(USAGE.format(tasks=" | ".join(tasks)), describe(config_class))
        sys.exit(0)

    config, bad = validate(config_class, values, written, mistakes)
    assert isinstance(config, Config)
    mistakes.extend(_setting_errors(config, bad))
    if fetch:  # room: wandb
        bad |= fetch(config, mistakes)
    if also and not bad & {"run_name", "output_dir", "resume"}:  # room: safeguards
        mistakes.extend(also(config))
    if not any(name.startswith("task") for name in bad):
        mistakes.extend(config.task.validation_errors())
        if config.task.metric_names is not None:  # room: best
            names = ["loss", "examples", *config.task.metric_names]
            mistakes.extend(metric_errors(config, [f"eval/{name}" for name in names]))
    refuse(dict.fromkeys(mistakes))
    return config


@explained("not the settings of a run: ", (KeyError, ValidationError))
def config_from(  # room: checkpoints evaluate generate safeguards
    saved: dict[str, Any],
    tasks: Mapping[str, str],
) -> Config:
    """Return the settings that a checkpoint or config.yaml holds. `tasks` are those of `load_config`.

    Raises:
        UserError: they are not a run's settings, or another version's.
    """
    # trackers need not be installed here
    used = {name: value for name, value in saved.items() if name not in ("trackers", "wandb")}
    return _config_class(saved["task"]["name"], tasks).model_validate(used)


@explained("task.name needs a package (for text, `pip install -e '.[text]'`): ", ModuleNotFoundError)  # room: text
def _config_class(task: str, tasks: Mapping[str, str]) -> type[Config]:
    # the task's file, and the libraries that it needs, are imported now: those of the others never
    task_class = resolve_name(tasks[task])
    return create_model("Config", __base__=Config, task=(task_class, Field(default_factory=task_class)))


def _setting_errors(config: Config, bad: set[str]) -> Iterator[str]:
    """Yield what no single setting can tell, a line each, but nothing of batches if their sizes are among the `bad`."""
    if not bad & {"global_batch_size", "micro_batch_size"}:
        yield from _batch_errors(config.global_batch_size, config.micro_batch_size, world_size(), cp_size())
    if not (config.epochs or config.max_steps):
        yield "epochs and max_steps are both null: set one of them"
    written = re.fullmatch(r"([1-9]\d*):(\d+)", config.profile_steps or "1:1")  # room: performance
    if not written or int(written[1]) > int(written[2]):  # room: performance
        yield f"profile_steps={config.profile_steps}: write the first step and the last, such as 10:15"
    if (warmup := config.optim.warmup_steps) > 1 and warmup % 1:
        yield f"optim.warmup_steps={warmup}: must be a whole number of steps, or below 1, a share of all"
    length = None if config.epochs else config.max_steps  # room: wsd
    yield from config.optim.decay_errors(length or math.inf)  # room: wsd
    if config.early_stopping.metric is None and config.early_stopping != EarlyStopping():  # room: best
        yield "early_stopping is off, as early_stopping.metric is null: name what to watch, such as eval/loss"
    if "wandb" in config.trackers:  # room: wandb
        yield from config.wandb.environment_errors()
    if repository := config.push_to_hub:  # room: hub
        if not re.fullmatch(r"[\w.-]+/[\w.-]+", repository):
            yield f"push_to_hub={repository}: must be USER/NAME"
        elif constants.HF_HUB_OFFLINE:
            yield f"push_to_hub={repository}: HF_HUB_OFFLINE is set; unset it, or take push_to_hub out"
        elif get_token() is None:
            yield f"push_to_hub={repository}: no credentials; `hf auth login` first"


def _batch_errors(size: int, micro: int | None, world_size: int, cp_size: int) -> Iterator[str]:
    unit = (micro or 1) * max(1, world_size // cp_size)
    if size % unit:
        dealt_to = processes(world_size, cp_size)
        product = f"{micro} (micro_batch_size) x {dealt_to} = {unit}" if micro else dealt_to
        sizes = " or ".join(str(near) for near in (size // unit * unit, size // unit * unit + unit) if near)
        yield f"global_batch_size={size}: not a multiple of {product}; nearest that are: global_batch_size={sizes}"


def metric_errors(config: Config, names: Collection[str]) -> list[str]:  # room: best
    """Return a line for each metric that the settings judge by but an evaluation, whose results have `names`, lacks."""
    judging = {"checkpoint": config.checkpoint.metric, "early_stopping": config.early_stopping.metric}
    return [
        f"{setting}.metric={name}: the evaluation has no such metric{nearest(name, list(names))} ({', '.join(names)})"
        for setting, name in judging.items()
        if name is not None and name not in names
    ]
