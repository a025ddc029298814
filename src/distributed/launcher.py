"""The launcher above this process, and the guard: what the accelerate yaml asks for is what runs.

Accelerate accepts a wrong yaml: it ignores misspelt FSDP keys, and on a machine without a GPU each process believes it
is alone and trains a separate model. Here each of these ends the run with one line.
"""

import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import psutil
import torch
from accelerate import Accelerator
from accelerate.commands.config.config_args import default_config_file
from accelerate.commands.launch import launch_command_parser
from ruamel.yaml.error import YAMLError

from src.config.config import Config
from src.config.environment import LaunchEnv, launcher_words
from src.config.errors import UserError, as_user_error, cause
from src.config.settings import nearest, read_yaml
from src.tasks.base import Task

SWITCHES = "ACCELERATE_USE_", "FSDP_", "PARALLELISM_CONFIG_"
"""Prefixes of variables that only the launcher should set, from the yaml. Set in the shell, they change what the yaml
asks for."""

REFUSED: dict[str, Any] = read_yaml(Path(__file__).with_name("refused.yaml").read_bytes())
"""What to do instead of what is not supported, by the launcher's variable and its value in capitals; OTHER: any other
value. Null: it is supported."""


class ParentLauncher(NamedTuple):
    """The `accelerate launch` process above this one."""

    arguments: Any
    """Its command line after `accelerate launch`, parsed."""
    config_file: str | None
    config: dict[str, Any]
    environment: dict[str, str]


def find_launcher() -> ParentLauncher | None:
    """Return Accelerate's launcher; None if another launcher, or none, started this process."""
    words = launcher_words()
    if not words:
        return None
    parent = psutil.Process(os.getppid())
    environment, folder = parent.environ(), Path(parent.cwd())
    arguments = launch_command_parser().parse_args(words)
    file = arguments.config_file or (default_config_file if Path(default_config_file).is_file() else None)
    with as_user_error(f"{file}: ", YAMLError):
        config = read_yaml((folder / file).read_bytes()) if file else {}
    return ParentLauncher(arguments, file, config, environment)


def refuse_another_strategy(accelerator: Accelerator, asked: LaunchEnv) -> None:
    """Raise a UserError if Accelerate has set up the processes differently than the launcher asked."""
    if accelerator.num_processes != asked.world_size:
        raise UserError(
            f"{asked.world_size} processes were started, but each sees {accelerator.num_processes}: refusing to train "
            "separate models"
        )
    if asked.fsdp and not accelerator.is_fsdp2:
        raise UserError(f"the yaml asks for FSDP, but Accelerate chose {accelerator.distributed_type}, or FSDP 1")


def unusable_gpu() -> str | None:
    """Return why torch can't use this machine's NVIDIA GPU; None if there is none, or it is hidden."""
    if os.environ.get("CUDA_VISIBLE_DEVICES") == "":
        return None
    if torch.version.cuda is None and shutil.which("nvidia-smi"):
        return f"this machine has an NVIDIA GPU, but torch {torch.__version__} is built without CUDA: install another"
    try:
        torch.cuda.init()
    except (AssertionError, RuntimeError) as error:
        return cause(error) if "too old" in str(error) else None
    return None


def launch_errors(
    launcher: ParentLauncher | None, config: Config[Task], asked: LaunchEnv, on_cpu: bool
) -> Iterator[str]:
    """Yield one line per reason why the run would differ from what was asked for: variables that override the settings
    or, if there are none, what this machine's devices cannot run and what is wrong with the launcher and its yaml.

    Args:
        on_cpu: whether the processes will train on the CPU.
    """
    shell = launcher.environment if launcher else {}
    overriding = [name for name in shell if name.startswith(SWITCHES)]
    for name in overriding:
        yield f"{name}={shell[name]} is set in the environment and would override the yaml: unset it"
    if overriding:
        return  # the other checks would judge its effect
    if on_cpu and not asked.cpu and (reason := unusable_gpu()):
        yield f"{reason}; accelerate_configs/cpu.yaml trains on the CPU"
    # before, attention saw what follows in bf16 (pytorch#195910), and events raised errors (pytorch#196395)
    is_too_old = torch.__version__ < "2.15"
    if not on_cpu and torch.backends.mps.is_available() and (is_too_old or asked.precision == "fp8"):
        yield "Apple's GPU needs torch 2.15 and has no fp8: accelerate_configs/cpu.yaml trains on the CPU"
    gpus = torch.accelerator.device_count()
    if not on_cpu and asked.local_world_size > gpus:
        yield f"{asked.local_world_size} processes on this machine, but it has {gpus} GPU(s): set --num_processes"
    for name, answers in REFUSED.items():
        if answer := answers.get(os.environ.get(name, "").upper(), answers.get("OTHER")):
            yield answer
    if asked.mesh_size not in (1, asked.world_size):
        yield (
            f"parallelism_config: dp_replicate_size x dp_shard_size x cp_size is {asked.mesh_size} and must equal the "
            f"number of processes, {asked.world_size}: change one"
        )
    if asked.cp_size > 1 and not (asked.fsdp and config.task.splits_sequences):
        yield f"task.name={config.task.name}: cp_size needs FSDP, and a task that can split sequences: remove it"
    if asked.fsdp and config.ddp_comm_hook:
        yield f"ddp_comm_hook={config.ddp_comm_hook} is for DDP, not FSDP: remove it"
    if not launcher:
        return
    arguments, file, content, _ = launcher
    wanted = arguments.num_processes or content.get("num_processes")
    if wanted and int(wanted) != asked.world_size:
        yield (
            f"{wanted} processes were requested, but {file or 'accelerate launch'} starts {asked.world_size}: "
            "use a yaml for several, such as accelerate_configs/ddp.yaml, or a multiple of the number of machines"
        )
    for section, prefix in (("fsdp_config", "fsdp_"), ("parallelism_config", "parallelism_config_")):
        known = [name for name in vars(arguments) if name.startswith(prefix)]
        for key in content.get(section) or {}:
            if prefix + key.removeprefix(prefix) not in known:
                yield f"{file}: {section} has no key {key}{nearest(key, known)}"
    if arguments.parallelism_config_cp_size != asked.cp_size and not content.get("parallelism_config"):
        yield f"--parallelism_config_cp_size: {file} has no parallelism_config; use a yaml that has one"
