"""The settings of a run and where they come from: the defaults in this file < yaml files < the command line."""

import math
import os
import re
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from pathlib import Path
from pkgutil import resolve_name
from types import MappingProxyType
from typing import Annotated, Any, Literal

from huggingface_hub import constants, get_token
from pydantic import Field, NonNegativeInt, PositiveFloat, PositiveInt, ValidationError, create_model

from src.config.environment import cp_size, leftovers, processes, world_size
from src.config.errors import explained, refuse
from src.config.groups import Checkpoint, EarlyStopping, Optim
from src.config.parts import PartSettings
from src.config.settings import (
    Elsewhere,
    Length,
    ResumeSafe,
    SafeReopens,
    Settings,
    Values,
    Written,
    describe,
    elsewhere,
    nearest,
    read_arguments,
    validate,
)
from src.config.terminal import say

USAGE = """\
accelerate launch --config_file accelerate_configs/ddp.yaml train.py [--config=FILE.yaml]... [--key.sub=value]...

Settings, with their defaults (a yaml given by --config overrides them, the command line overrides both).
The task's own are shown for the chosen one: --task.name={tasks}
"""
PLACE = {"run_name", "output_dir", "resume"}
"""Settings that say where in the file system a run is."""


class RunSettings(Settings):
    """The settings that each run has."""

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
    activation_checkpointing: ResumeSafe[bool] = False
    """Recompute activations in the backward pass instead of keeping them: less memory, a third more time."""
    compile: ResumeSafe[bool] = False
    """Compile the model, a transformer block by block. The first steps then take a minute."""
    cuda_graphs: ResumeSafe[bool] = False
    """Record a step, and launch its kernels all at once: for small models, on one NVIDIA GPU."""
    fsdp_reduce_each_micro_batch: ResumeSafe[bool] = True
    """Reduce gradients after each micro-batch; false: after the last, as DDP does, which takes the memory of all of
    them on each process, in fp32, but exchanges less."""
    ddp_comm_hook: ResumeSafe[Literal["bf16", "fp16"] | None] = None
    """Type that DDP casts gradients to while it sums them over the processes, for slow connections; null: none."""
    num_workers: ResumeSafe[NonNegativeInt] = 0
    """Processes that load data for each training process; 0: it loads the data itself."""
    profile_steps: ResumeSafe[str | None] = None
    """The first and the last step to profile, as 10:15, into output_dir/profile; null: none."""
    log_every: ResumeSafe[PositiveInt] = 50
    """Steps between records of the training metrics."""
    eval_every: ResumeSafe[PositiveInt | None] = None
    """Steps between evaluations; null: at the end of each epoch. The last step is always followed by one."""
    save_every: ResumeSafe[PositiveInt] = 500
    """Steps between checkpoints. The last step is always followed by one."""
    resume: ResumeSafe[Elsewhere[str]] = "auto"
    """auto: from the newest valid checkpoint in output_dir, or from the start if there is no run; never: refuse an
    output_dir that holds a run; or a checkpoint's folder, even another run's, or wandb:entity/project/name:alias."""
    max_hours: ResumeSafe[PositiveFloat | None] = None
    """Hours after which to save and stop, so that the run can be continued; null: no limit."""
    max_bad_steps: ResumeSafe[PositiveInt] = 10
    """Steps in a row skipped because of gradients that are not finite, after which the run fails."""
    timeout_minutes: ResumeSafe[PositiveFloat] = 30.0
    """Minutes that a process waits for the others in an exchange; then one counts as hung, and the run fails."""
    dry_run: ResumeSafe[bool] = False
    """Do all up to the first step, write nothing, and say what the run would do; `--dry-run` alone is enough."""
    push_to_hub: SafeReopens[str | None] = None
    """Repository on the Hub, USER/NAME, that the model is uploaded to at the end; private if new; null: none."""
    task: Any
    """The settings of the task that `task.name` picks: a src.tasks.base.Task."""
    optim: Optim = Optim()
    checkpoint: ResumeSafe[Checkpoint] = Checkpoint()
    early_stopping: SafeReopens[EarlyStopping] = EarlyStopping()


class Config(PartSettings, RunSettings):
    """All settings of a run."""

    @property
    def folder(self) -> Path:
        """Return output_dir, filled in."""
        name = self.run_name
        if "WANDB_SWEEP_ID" in os.environ:
            # `wandb agent` repeats one command: each trial of a sweep gets a folder of its own
            name += f"-{os.environ.get('WANDB_RUN_ID')}"
        return Path(self.output_dir.replace("{run_name}", name))

    @property
    def mode(self) -> str:
        """Return `train`, or what is asked for in its place: `check` or `dry_run`."""
        return next((mode for mode in ("check", "dry_run") if getattr(self, mode, False)), "train")

    @property
    def mirror(self) -> str | None:
        """Return where checkpoints are copied to; None: nowhere, as in a copy that leaves mirrors out."""
        return getattr(self.checkpoint, "mirror", None)

    @property
    def saves(self) -> bool:
        """Return whether the run trains, keeps a record and saves checkpoints."""
        return self.mode == "train"

    def steps_per_epoch(self, examples: int) -> int:
        """Return the optimizer steps of an epoch of so many examples: its smaller last batch is a step as well."""
        return math.ceil(examples / self.global_batch_size)

    def total_steps(self, examples: int) -> int:
        """Return the optimizer steps to take, where an epoch has so many examples."""
        return self.max_steps or (self.epochs or 0) * self.steps_per_epoch(examples)

    def schedule_steps(self, examples: int) -> int:
        """Return the optimizer steps that the learning-rate schedule spans, where an epoch has so many examples."""
        return max(self.max_steps or 0, (self.epochs or 0) * self.steps_per_epoch(examples))

    def micro_batch(self, data_size: int) -> int:
        """Return the examples per forward pass of a process, where the data are dealt to `data_size` of them."""
        return self.micro_batch_size or self.global_batch_size // data_size

    def gradient_accumulation_steps(self, data_size: int) -> int:
        """Return the micro-batches per optimizer step of a process, where the data are dealt to `data_size` of them."""
        return self.global_batch_size // (self.micro_batch(data_size) * data_size)

    def validation_errors(self) -> Iterator[str]:
        yield from super().validation_errors()
        yield from _batch_errors(self.global_batch_size, self.micro_batch_size, world_size(), cp_size())
        if not (self.epochs or self.max_steps):
            yield "epochs and max_steps are both null: set one of them"
        profiled = re.fullmatch(r"([1-9]\d*):(\d+)", self.profile_steps or "1:1")
        if not profiled or int(profiled[1]) > int(profiled[2]):
            yield f"profile_steps={self.profile_steps}: write the first step and the last, such as 10:15"
        length = None if self.epochs else self.max_steps
        yield from self.optim.decay_errors(length or math.inf)
        if self.mode == "check" and self.dry_run:
            yield "dry_run: writes nothing, and check writes check.json; choose one of them"
        if repository := self.push_to_hub:
            if not re.fullmatch(r"[\w.-]+/[\w.-]+", repository):
                yield f"push_to_hub={repository}: must be USER/NAME"
            elif constants.HF_HUB_OFFLINE:
                yield f"push_to_hub={repository}: HF_HUB_OFFLINE is set; unset it, or take push_to_hub out"
            elif get_token() is None:
                yield f"push_to_hub={repository}: no credentials; `hf auth login` first"
        if self.task.metric_names is not None:
            yield from metric_errors(self, [f"eval/{name}" for name in ("loss", "examples", *self.task.metric_names)])


def load_config(
    argv: list[str],
    tasks: Mapping[str, str],
    place_errors: Callable[[Config], Iterable[str]] = lambda _: (),
    downloads: Mapping[str, Callable[[str], Path]] = MappingProxyType({}),
) -> Config:
    """Read the settings; if `argv` asks for --help, print them and exit with code 0.

    Args:
        tasks: where each task's class is, by name.
        place_errors: yields what is wrong with the run's place in the file system, one line each.
        downloads: what fetches `scheme:rest` that a setting names and returns its folder, by scheme. Where there are
            mistakes, nothing is fetched.

    Raises:
        UserError: the settings have mistakes; all of them, one per line.
    """
    wants_help = "--help" in argv or "-h" in argv
    mistakes = [*leftovers()]
    values, written = read_arguments([a for a in argv if a not in ("--help", "-h")], mistakes)

    name = str(values.get("task.name", next(iter(tasks))))
    if name not in tasks:
        mistakes.append(f"{written['task.name']}: no such task{nearest(name, list(tasks))} ({', '.join(tasks)})")
        values = {key: value for key, value in values.items() if not key.startswith("task.")}
        name = next(iter(tasks))
    config_class = _config_class(name, tasks)
    if wants_help:
        say(USAGE.format(tasks=" | ".join(tasks)), describe(config_class))
        sys.exit(0)

    values["task.name"] = name
    values["run_name"] = values.get("run_name") or name
    remote = elsewhere(config_class, values, downloads)
    if remote:
        _checked(config_class, values, written, mistakes, place_errors, {*remote})
        for setting, (scheme, rest) in remote.items():
            with explained(f"{setting}={scheme}:{rest}: cannot be downloaded, "):
                values[setting] = str(downloads[scheme](rest))
    return _checked(config_class, values, written, mistakes, place_errors)


def _checked(
    config_class: type[Config],
    values: Values,
    written: Written,
    mistakes: list[str],
    place_errors: Callable[[Config], Iterable[str]],
    unknown: Collection[str] = (),
) -> Config:
    """Return the settings, those that are `unknown` yet by their defaults.

    Raises:
        UserError: there are mistakes, or were any before.
    """
    config, bad = validate(config_class, values, written, mistakes, unknown)
    assert isinstance(config, Config)
    if not bad & PLACE:
        mistakes.extend(place_errors(config))
    refuse(dict.fromkeys(mistakes))
    return config


@explained("not the settings of a run: ", (KeyError, ValidationError))
def config_from(saved: dict[str, Any], tasks: Mapping[str, str]) -> Config:
    """Return the settings that a checkpoint or config.yaml holds. `tasks` are those of `load_config`.

    Raises:
        UserError: they are not a run's settings, or another version's.
    """
    return _config_class(saved["task"]["name"], tasks).model_validate(saved)


@explained("task.name needs a package (for text, `pip install -e '.[text]'`): ", ModuleNotFoundError)
def _config_class(task: str, tasks: Mapping[str, str]) -> type[Config]:
    # the task's file, and the libraries that it needs, are imported now: those of the others never
    task_class = resolve_name(tasks[task])
    return create_model("Config", __base__=Config, task=(task_class, Field(default_factory=task_class)))


def _batch_errors(size: int, micro: int | None, world_size: int, cp_size: int) -> Iterator[str]:
    unit = (micro or 1) * max(1, world_size // cp_size)
    if size % unit:
        dealt_to = processes(world_size, cp_size)
        product = f"{micro} (micro_batch_size) x {dealt_to} = {unit}" if micro else dealt_to
        sizes = " or ".join(str(near) for near in (size // unit * unit, size // unit * unit + unit) if near)
        yield f"global_batch_size={size}: not a multiple of {product}; nearest that are: global_batch_size={sizes}"


def metric_errors(config: Config, names: Collection[str]) -> list[str]:
    """Return a line for each metric that the settings judge by but an evaluation, whose results have `names`, lacks."""
    judging = {"checkpoint": config.checkpoint.metric, "early_stopping": config.early_stopping.metric}
    return [
        f"{setting}.metric={name}: the evaluation has no such metric{nearest(name, list(names))} ({', '.join(names)})"
        for setting, name in judging.items()
        if name is not None and name not in names
    ]
