"""The launcher above this process: `accelerate launch`, with its arguments and its yaml, or another one, or none."""

import os
import shlex
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
from accelerate.commands.config.config_args import default_config_file
from accelerate.commands.launch import launch_command_parser
from ruamel.yaml.error import YAMLError

from src.config.config import Config
from src.config.environment import cp_size, world_size
from src.config.errors import explained
from src.config.settings import read_yaml


@dataclass(frozen=True)
class Launcher:
    """The `accelerate launch` process above this one: its arguments, yaml and environment."""

    words: list[str]
    arguments: Any
    config_file: str | None
    config: dict[str, Any]
    environment: dict[str, str]


@dataclass(frozen=True)
class Asked:
    """What the launcher asks of this process, by environment variables."""

    world_size: int
    local_world_size: int
    """The processes on this machine."""
    cpu: bool
    fsdp: bool
    cp_size: int
    """The processes that share each sequence."""
    precision: str
    """Mixed precision: no, bf16, fp16 or fp8."""


def find_launcher() -> Launcher | None:
    """Return Accelerate's launcher; None if another one, or none, started this process."""
    try:
        parent = psutil.Process(os.getppid())
        command, environment, folder = parent.cmdline(), parent.environ(), Path(parent.cwd())
    except psutil.Error:
        return None
    names = [Path(word).name for word in command]
    for start, name in enumerate(names):
        if name == "accelerate" and names[start + 1 : start + 2] == ["launch"]:
            words = command[start + 2 :]
        elif name in ("accelerate-launch", "accelerate.commands.launch"):
            words = command[start + 1 :]
        else:
            continue
        arguments = launch_command_parser().parse_args(words)
        file = arguments.config_file or (default_config_file if Path(default_config_file).is_file() else None)
        with explained(f"{file}: ", YAMLError):
            config = read_yaml((folder / file).read_bytes()) if file else {}
        return Launcher(words, arguments, file, config, environment)
    return None


def what_is_asked() -> Asked:
    """Return what the launcher asks of this process; without a launcher, one process."""
    return Asked(
        world_size=world_size(),
        local_world_size=int(os.environ.get("LOCAL_WORLD_SIZE", "1")),
        cpu=is_set("ACCELERATE_USE_CPU"),
        fsdp=is_set("ACCELERATE_USE_FSDP"),
        cp_size=cp_size(),
        precision=os.environ.get("ACCELERATE_MIXED_PRECISION", "no"),
    )


def is_set(name: str) -> bool:
    """Return whether the launcher has set this switch."""
    return os.environ.get(name, "").lower() == "true"


def resume_command(config: Config) -> str:
    """Return what the user typed, with --resume=auto added if the run was to branch off or start anew, so that it
    continues from its own checkpoint."""
    launcher = find_launcher()
    if launcher:
        command = ["accelerate", "launch", *launcher.words]
    elif "TORCHELASTIC_RUN_ID" in os.environ:
        command = psutil.Process(os.getppid()).cmdline()
    else:
        command = sys.orig_argv
    return shlex.join(command if config.resume == "auto" else [*command, "--resume=auto"])
