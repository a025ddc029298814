"""The settings of a run and where they come from: the defaults in this file < yaml files < the command line.

Nothing here imports torch: a mistake or `--help` is answered before anything heavy is loaded.
"""

import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt, create_model

from src.settings import Settings, describe, nearest, read_arguments, validate
from src.tasks import TASKS
from src.tasks.base import Task

USAGE = """\
accelerate launch --config_file accelerate_configs/ddp.yaml train.py [--config=FILE.yaml]... [--key.sub=value]...

Settings, with their defaults (a yaml given by --config overrides them, the command line overrides both).
The task's own are shown for the chosen one: --task.name={tasks}
"""
RUN_FILES = ("config.yaml", "metrics.jsonl", "summary.json", "model", "wandb")
"""What a run writes into its output folder."""

Share = Annotated[float, Field(ge=0, lt=1)]


class Optim(Settings):
    """The optimizer and its learning rate."""

    name: Literal["adamw", "sgd", "adadelta", "muon"] = "adamw"
    """The optimizer. muon takes the hidden weight matrices and leaves the rest to adamw, at the same rate."""
    lr: PositiveFloat = 3e-3
    """Peak learning rate."""
    weight_decay: NonNegativeFloat = 0.01
    """Decoupled for adamw and muon. Biases, norms and other vectors never decay."""
    betas: tuple[Share, Share] = (0.9, 0.999)
    """Decay rates of adamw's first and second moment."""
    momentum: Share = 0.9
    """Of sgd and muon."""
    max_grad_norm: PositiveFloat | None = None
    """Global L2 norm that gradients are clipped to; null: no clipping."""
    schedule: Literal["constant", "linear", "cosine", "step", "one_cycle"] = "one_cycle"
    """Course of the learning rate: see lr_at in src/optim.py."""
    warmup_steps: NonNegativeFloat = 0.3
    """Steps until the peak is reached; below 1: as a share of the schedule."""
    final_lr_ratio: Annotated[float, Field(ge=0, le=1)] = 0.0
    """Learning rate at the end of linear, cosine and one_cycle, as a share of the peak."""
    decay_factor: Annotated[float, Field(gt=0, le=1)] = 0.7
    """What schedule=step multiplies the learning rate by."""
    decay_epochs: PositiveFloat = 1.0
    """Epochs between two such multiplications."""


class Wandb(Settings):
    """Weights & Biases. Its own WANDB_* environment variables work too."""

    mode: Literal["auto", "online", "offline", "disabled"] = "auto"
    """auto: WANDB_MODE, else online where there are credentials, else offline."""
    project: str | None = None
    """Project that the run is filed under; null: WANDB_PROJECT, else accelerate-template."""
    entity: str | None = None
    """User or team that owns the project; null: WANDB_ENTITY, else the account's default."""
    tags: list[str] = []
    """Labels to find the run by."""


class Config(Settings):
    """One run."""

    run_name: str = ""
    """Name of the run; empty: the task's name."""
    output_dir: str = "runs/{run_name}"
    """Folder that the run writes into. One that holds a run already is refused."""
    seed: Annotated[NonNegativeInt, Field(lt=2**32)] = 0
    """Of the initial weights, the order of the data, the augmentation and the dropout."""
    epochs: PositiveInt | None = 10
    """Passes over the training data, and what the learning rate's schedule spans."""
    max_steps: PositiveInt | None = None
    """Optimizer steps to take, whatever epochs says. Fewer: the same curve, cut off. More: the schedule stretches."""
    global_batch_size: PositiveInt = 64
    """Examples per optimizer step, over all processes and accumulated micro-batches."""
    micro_batch_size: PositiveInt | None = None
    """Examples per forward pass of a process; null: global_batch_size / processes, without accumulation."""
    activation_checkpointing: bool = False
    """Compute activations again in the backward pass instead of keeping them: less memory, a third more time."""
    compile: bool = False
    """Compile the model, a transformer block by block. The first steps then take a minute."""
    num_workers: NonNegativeInt = 0
    """Processes that load data for each training process; 0: it loads them itself."""
    log_every: PositiveInt = 50
    """Steps between records of the training metrics."""
    eval_every: PositiveInt | None = None
    """Steps between evaluations; null: at the end of each epoch. The last step is always followed by one."""
    push_to_hub: str | None = None
    """Repository on the Hub, USER/NAME, that the model is uploaded to at the end; private if new; null: none."""
    task: Task
    """What is trained."""
    optim: Optim = Optim()
    """The optimizer and its learning rate."""
    wandb: Wandb = Wandb()
    """Tracking."""

    def model_post_init(self, _: Any) -> None:
        self.run_name = self.run_name or self.task.name

    @property
    def folder(self) -> Path:
        """output_dir, filled in. `wandb agent` repeats one command: each trial of a sweep gets a folder of its own."""
        trial = f"-{os.environ['WANDB_RUN_ID']}" if "WANDB_SWEEP_ID" in os.environ else ""
        return Path(self.output_dir.replace("{run_name}", self.run_name + trial))

    def steps(self, steps_per_epoch: int) -> tuple[int, int]:
        """Optimizer steps to take, and those that the learning rate's schedule spans."""
        planned = (self.epochs or 0) * steps_per_epoch
        total = self.max_steps or planned
        return total, max(total, planned)

    def micro_batch(self, world_size: int) -> int:
        """Examples per forward pass of one of `world_size` processes."""
        return self.micro_batch_size or self.global_batch_size // world_size

    def accumulation(self, world_size: int) -> int:
        """Micro-batches per optimizer step on each of `world_size` processes."""
        return self.global_batch_size // (self.micro_batch(world_size) * world_size)


def load_config(argv: list[str]) -> Config:
    """Reads the settings; prints them and exits with 0 where `argv` asks for --help.

    Raises:
        ValueError: with all mistakes, one per line.
    """
    wants_help = "--help" in argv or "-h" in argv
    mistakes: list[str] = []
    values, written = read_arguments([a for a in argv if a not in ("--help", "-h")], mistakes)

    name = str(values.get("task.name", "mnist"))
    if name not in TASKS:
        mistakes.append(f"{written['task.name']}: no such task{nearest(name, list(TASKS))} ({', '.join(TASKS)})")
        values = {key: value for key, value in values.items() if not key.startswith("task.")}
        name = "mnist"
    task_class = TASKS[name]
    config_class = create_model("Config", __base__=Config, task=(task_class, Field(default_factory=task_class)))
    if wants_help:
        print(USAGE.format(tasks=" | ".join(TASKS)), describe(config_class), sep="\n")
        sys.exit(0)

    config, bad = validate(config_class, values, written, mistakes)
    assert isinstance(config, Config)
    if not bad & {"global_batch_size", "micro_batch_size"}:
        mistakes.extend(_batch_mistakes(config, int(os.environ.get("WORLD_SIZE", "1"))))
    if not (config.epochs or config.max_steps):
        mistakes.append("epochs and max_steps are both null: set one of them")
    if not bad & {"run_name", "output_dir"}:
        mistakes.extend(_output_mistakes(config.folder))
    if not any(name.startswith("task") for name in bad):
        mistakes.extend(config.task.mistakes())
    if config.push_to_hub:
        mistakes.extend(_hub_mistakes(config.push_to_hub))
    if mistakes:
        raise ValueError("\n".join(mistakes))
    return config


def _batch_mistakes(config: Config, world_size: int) -> Iterator[str]:
    size, micro = config.global_batch_size, config.micro_batch_size
    unit = (micro or 1) * world_size
    if size % unit == 0:
        return
    product = f"{micro} (micro_batch_size) x {world_size} processes = {unit}" if micro else f"{unit} processes"
    nearest_sizes = sorted({max(size // unit, 1) * unit, (size // unit + 1) * unit if size > unit else unit})
    line = f"global_batch_size={size}: not a multiple of {product}; nearest that are: global_batch_size="
    line += " or ".join(map(str, nearest_sizes))
    if micro and size % world_size == 0:
        divisors = [d for d in range(1, size // world_size + 1) if size // world_size % d == 0]
        below, above = [d for d in divisors if d < micro][-1:], [d for d in divisors if d > micro][:1]
        line += ", micro_batch_size=" + " or ".join(map(str, below + above))
    yield line


def _output_mistakes(folder: Path) -> Iterator[str]:
    held = [name for name in RUN_FILES if os.path.lexists(folder / name)]
    if held:
        yield (
            f"output_dir={folder}: holds a run already ({', '.join(held)}); "
            f"choose another --run_name or --output_dir, or move that folder away"
        )
        return
    parent = next(p for p in (folder, *folder.absolute().parents) if os.path.exists(p))
    if not parent.is_dir():
        yield f"output_dir={folder}: {parent} is a file, not a folder; choose another --output_dir"
    elif not os.access(parent, os.W_OK | os.X_OK):
        yield f"output_dir={folder}: no permission to write in {parent}; choose another --output_dir"


def _hub_mistakes(repository: str) -> Iterator[str]:
    from huggingface_hub import constants, get_token

    if not re.fullmatch(r"[\w.-]+/[\w.-]+", repository):
        yield f"push_to_hub={repository}: must be USER/NAME"
    elif constants.HF_HUB_OFFLINE:
        yield f"push_to_hub={repository}: HF_HUB_OFFLINE is set; unset it, or take push_to_hub out"
    elif get_token() is None:
        yield f"push_to_hub={repository}: no credentials; `hf auth login` first"
