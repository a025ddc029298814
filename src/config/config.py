"""The settings of a run: defaults in this file < yaml files < the command line."""

import contextlib
import math
import os
import re
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from functools import reduce
from operator import getitem
from pathlib import Path
from pkgutil import resolve_name
from typing import Annotated, Any, Literal

from huggingface_hub import constants, get_token
from pydantic import Field, NonNegativeInt, PositiveFloat, PositiveInt, ValidationError, create_model

from src.config.aliases import translate
from src.config.environment import LaunchEnv, command_with, leftovers, processes
from src.config.errors import UserError, as_user_error, raise_if_any
from src.config.groups import Checkpoint, EarlyStopping, Optim, PartSettings
from src.config.settings import (
    DOWNLOADABLE,
    Change,
    Downloadable,
    Length,
    ResumeSafe,
    SafeReopens,
    Settings,
    flatten,
    help_lines,
    marked,
    nearest,
    read_arguments,
    setting_fields,
    validate,
    with_defaults,
)
from src.config.terminal import BIN, say

USAGE = """\
accelerate launch --config_file accelerate_configs/ddp.yaml
    train.py [--config=FILE.yaml]... [--key.sub=value]...

Settings and their defaults. Yamls given by --config override the defaults; the
command line overrides both. The task's own settings are shown for the chosen
--task.name:
"""
PLACE = {"run_name", "output_dir", "resume"}
"""Settings that determine the files a run reads and writes."""


class RunSettings(Settings):
    """Settings that every run has."""

    run_name: ResumeSafe[str] = ""
    """Name of the run and of its folders, such as chat or group/chat; empty: the task's name."""
    output_dir: ResumeSafe[Annotated[str, Field(min_length=1)]] = "runs/{run_name}"
    """Output folder of the run."""
    seed: Annotated[NonNegativeInt, Field(lt=2**32)] = 0
    """Seed of initial weights, data order, augmentation and dropout."""
    epochs: Length[PositiveInt | None] = 10
    """Passes over the training data; the learning-rate schedule spans them."""
    max_steps: Length[PositiveInt | None] = None
    """Optimizer steps, overriding epochs. If fewer, the same curve is cut short; if more, the schedule stretches."""
    global_batch_size: PositiveInt = 64
    """Examples per optimizer step, over all processes and accumulated micro-batches."""
    micro_batch_size: ResumeSafe[PositiveInt | None] = None
    """Examples per forward pass of each process; null: global_batch_size / processes, without accumulation."""
    activation_checkpointing: ResumeSafe[bool] = False
    """Recompute activations in the backward pass instead of storing them: less memory, a third more time."""
    compile: ResumeSafe[bool] = False
    """Compile the model, a transformer block by block. The first steps take about a minute longer."""
    cuda_graphs: ResumeSafe[bool] = False
    """Replay each step as a CUDA graph: for small models on one NVIDIA GPU."""
    fsdp_reduce_each_micro_batch: ResumeSafe[bool] = True
    """Under FSDP, reduce gradients after each micro-batch; false: only after the last, which communicates less but
    holds full fp32 gradients on each rank."""
    ddp_comm_hook: ResumeSafe[Literal["bf16", "fp16"] | None] = None
    """Dtype that DDP all-reduces gradients in, to spare slow networks; null: their own."""
    num_workers: ResumeSafe[NonNegativeInt] = 0
    """Data-loading workers per process; 0: load in the process itself."""
    profile_steps: ResumeSafe[str | None] = None
    """First and last step to profile, such as 10:15, into output_dir/profile; null: none."""
    log_every: ResumeSafe[PositiveInt] = 50
    """Steps between logs of the training metrics."""
    eval_every: ResumeSafe[PositiveInt | None] = None
    """Steps between evaluations; null: one per epoch. There is always one after the last step."""
    save_every: ResumeSafe[PositiveInt] = 500
    """Steps between checkpoints. There is always one after the last step."""
    resume: ResumeSafe[Downloadable[str]] = "auto"
    """auto: resume from the newest valid checkpoint in output_dir, if there is one; never: refuse an output_dir that
    holds a run; or start from any checkpoint, given as its folder or as wandb:entity/project/name:alias."""
    max_hours: ResumeSafe[PositiveFloat | None] = None
    """Save and stop after this many hours, so that the run can be resumed; null: no limit."""
    max_bad_steps: ResumeSafe[PositiveInt] = 10
    """Fail after this many consecutive non-finite steps."""
    timeout_minutes: ResumeSafe[PositiveFloat] = 30.0
    """Collective timeout, in minutes. The run fails if a process hangs for longer."""
    dry_run: ResumeSafe[bool] = False
    """Do everything up to the first step, write nothing, and print what the run would do; `--dry-run` is enough."""
    push_to_hub: SafeReopens[str | None] = None
    """Hub repository, USER/NAME, to upload the model to at the end; private if new; null: none."""
    task: Any
    """Settings of the task chosen by `task.name`: a src.tasks.base.Task."""
    optim: Optim = Optim()
    checkpoint: ResumeSafe[Checkpoint] = Checkpoint()
    early_stopping: SafeReopens[EarlyStopping] = EarlyStopping()


class Config(PartSettings, RunSettings):
    """All settings of a run."""

    @property
    def folder_name(self) -> str:
        """Return run_name; in a sweep with the trial's id, as `wandb agent` repeats one command."""
        return self.run_name + (f"-{os.environ.get('WANDB_RUN_ID')}" if os.environ.get("WANDB_SWEEP_ID") else "")

    @property
    def folder(self) -> Path:
        """Return output_dir with run_name filled in."""
        return Path(self.output_dir.replace("{run_name}", self.folder_name))

    @property
    def mode(self) -> str:
        """Return `train`, or `check` or `dry_run` if asked for instead."""
        return next((mode for mode in ("check", "dry_run") if getattr(self, mode, False)), "train")

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
        yield from self._batch_errors()
        if not (self.epochs or self.max_steps):
            yield "epochs and max_steps are both null: set one of them"
        profiled = re.fullmatch(r"([1-9]\d*):(\d+)", self.profile_steps or "1:1")
        if not profiled or int(profiled[1]) > int(profiled[2]):
            yield f"profile_steps={self.profile_steps}: name the first and the last step, such as 10:15"
        yield from self.optim.decay_errors(math.inf if self.epochs else self.max_steps or math.inf)
        if self.mode == "check" and self.dry_run:
            yield "--check and --dry-run cannot be combined: choose one"
        if repository := self.push_to_hub:
            if not re.fullmatch(r"[\w.-]+/[\w.-]+", repository):
                yield f"push_to_hub={repository}: must be USER/NAME"
            elif constants.HF_HUB_OFFLINE:
                yield f"push_to_hub={repository}: HF_HUB_OFFLINE is set; unset it, or remove push_to_hub"
            elif get_token() is None:
                yield f"push_to_hub={repository}: no credentials; run `{BIN}hf auth login`"
        if self.task.metric_names is not None:
            yield from metric_errors(self, [f"eval/{name}" for name in ("loss", "examples", *self.task.metric_names)])

    def _batch_errors(self) -> Iterator[str]:
        size, micro, launch = self.global_batch_size, self.micro_batch_size, LaunchEnv()
        unit = (micro or 1) * max(1, launch.world_size // launch.cp_size)
        if size % unit:
            split_over = processes(launch.world_size, launch.cp_size)
            product = f"{micro} (micro_batch_size) x {split_over} = {unit}" if micro else split_over
            below = size // unit * unit
            sizes = f"{below} or {below + unit}".removeprefix("0 or ")
            yield f"global_batch_size={size}: not a multiple of {product}; nearest that are: global_batch_size={sizes}"


LENGTH_SETTINGS = marked(Config, Change.LENGTH)
"""Settings that determine how long a run is."""


def changed_settings(config: Config, saved: dict[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Return the (old, new) values, by name, of changed settings that make this a different run or, for epochs and
    max_steps, a longer or shorter one."""
    now, changed = config.model_dump(mode="json"), {}
    for name, _, marks in setting_fields(type(config)):
        if Change.SAFE in marks:
            continue
        with contextlib.suppress(KeyError, TypeError):  # another version of the code did not have it
            before, after = (reduce(getitem, name.split("."), values) for values in (saved, now))
            if before != after:
                changed[name] = before, after
    return changed


def load_config(
    argv: list[str],
    tasks: Mapping[str, str],
    place_errors: Callable[[Config], Iterable[str]] = lambda _: (),
    downloads: Mapping[str, str] = {},
    may_download: bool = True,
) -> Config:
    """Read the settings; if `argv` contains --help, print them and exit with code 0.

    Args:
        tasks: import path of each task's class, or of its settings', by name.
        place_errors: yields an error line for each problem with the run's files.
        downloads: by scheme, the import path of a function that downloads NAME of a setting that is SCHEME:NAME and
            returns the folder. Nothing is downloaded if there are mistakes.
        may_download: False: return these settings as they are, unchecked.

    Raises:
        UserError: the settings have mistakes. All of them are listed, one per line.
    """
    misread = [*leftovers()]
    values, written = read_arguments(argv, misread)
    mistakes, given = [*misread], values

    default, *_ = tasks
    name = str(values.get("task.name", default))
    if name not in tasks:
        mistakes.append(f"{written['task.name']}: no such task{nearest(name, list(tasks))} ({', '.join(tasks)})")
        values = {key: value for key, value in values.items() if not key.startswith("task.")}
        name = default
    config_class = _config_class(name, tasks, dict(flatten(values)))
    if {"--help", "-h"} & {*argv}:
        say(*USAGE.splitlines(), *(f"  {task}" for task in tasks), "", *help_lines(config_class))
        sys.exit(0)

    values["task.name"] = name
    values["run_name"] = values.get("run_name") or name
    config, wrong = validate(config_class, values, written, mistakes)
    if wrong:
        hints, ours = translate(given, written)
        launch = f"{ours.pop('launch', '')} {ours.pop('precision', '')}".split()
        arguments = [f"--{name}={text}" for name, text in ours.items()]
        if hints:
            try:
                load_config(arguments, tasks, place_errors, downloads, False)
            except UserError as error:
                hints += error.args
            said = "\n".join(hints)
            arguments = [word for word in arguments if word.startswith("--task.name=") or f"\n{word}: " not in said]
            here = "in this project's terms, without what these lines leave out, and with its defaults for the rest:"
            raise_if_any(dict.fromkeys([*misread, *hints, here, f"  {command_with(arguments, launch)}"]))
    remote = {
        name: parts
        for name in marked(config_class, DOWNLOADABLE) & values.keys()
        if (parts := str(values[name]).partition(":"))[1] and parts[0] in downloads
    }
    if not wrong & PLACE and "resume" not in remote:
        mistakes.extend(place_errors(config))
    raise_if_any(dict.fromkeys(mistakes))
    if not remote or not may_download:
        return config
    for name, (scheme, _, source) in remote.items():
        with as_user_error(f"{name}={scheme}:{source}: cannot be downloaded, "):
            argv = [*argv, f"--{name}={resolve_name(downloads[scheme])(source)}"]
    return load_config(argv, tasks, place_errors)


@as_user_error("not the settings of a run: ", (KeyError, TypeError, ValidationError))
def config_from(saved: dict[str, Any], tasks: Mapping[str, str]) -> Config:
    """Return the settings saved in a checkpoint or config.yaml. `tasks` is as for `load_config`.

    Raises:
        UserError: these are not the settings of a run, or of another version.
    """
    return _config_class(saved["task"]["name"], tasks).model_validate(saved)


@as_user_error(
    f"task.name needs a package (for text, `{BIN}python -m pip install -e '.[text]'`): ", ModuleNotFoundError
)
def _config_class(task: str, tasks: Mapping[str, str], given: Mapping[str, Any] = {}) -> type[Config]:
    # import this task's file, and the libraries it needs, but no other task's
    task_class = resolve_name(tasks[task])
    config_class: type[Config] = with_defaults(Config, task_class.run_defaults(given))
    return create_model("Config", __base__=config_class, task=(task_class, Field(default_factory=task_class)))


def metric_errors(config: Config, names: Collection[str]) -> list[str]:
    """Return an error line for each metric in the settings that is not among the `names` of an evaluation's results."""
    chosen = {"checkpoint": config.checkpoint.metric, "early_stopping": config.early_stopping.metric}
    return [
        f"{setting}.metric={name}: the evaluation has no such metric{nearest(name, list(names))} ({', '.join(names)})"
        for setting, name in chosen.items()
        if name is not None and name not in names
    ]
