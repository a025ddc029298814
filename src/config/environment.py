"""The launcher above this process: its command, the environment variables by which it tells a process what to join, and
leftovers of another launch."""

import contextlib
import os
import re
import shlex
import sys
from collections.abc import Collection, Iterator

import psutil

from src.config.terminal import BIN

LAUNCH_VARIABLES = {"WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1", "RANK": "0", "LOCAL_RANK": "0"}
"""Variables by which launchers tell a process (and Accelerate) about the other processes, and their values for one that
is alone."""


class LaunchEnv:
    """Reads from environment variables what the launcher asks of this process; by default, to run alone."""

    def __init__(self) -> None:
        self.world_size = _size("WORLD_SIZE")
        self.local_world_size = _size("LOCAL_WORLD_SIZE")
        """Number of processes on this machine."""
        self.cp_size = _size("PARALLELISM_CONFIG_CP_SIZE")
        """Number of processes that share each sequence (context parallelism)."""
        self.mesh_size = (
            self.cp_size * _size("PARALLELISM_CONFIG_DP_SHARD_SIZE") * _size("PARALLELISM_CONFIG_DP_REPLICATE_SIZE")
        )
        """Number of processes that the yaml's parallelism_config describes; 1 without."""
        switches = "ACCELERATE_USE_CPU", "ACCELERATE_USE_FSDP"
        self.cpu, self.fsdp = (os.environ.get(name, "").lower() == "true" for name in switches)
        self.precision = os.environ.get("ACCELERATE_MIXED_PRECISION", "no")
        """Mixed precision: no, bf16, fp16 or fp8."""


def _size(name: str) -> int:
    value = os.environ.get(name, "")
    return max(1, int(value)) if value.isdigit() else 1


def launcher_words() -> list[str]:
    """Return the words after `accelerate launch` of the process above this one; none if it is another."""
    with contextlib.suppress(psutil.Error):
        # words end with \0, which no word can have
        command = "\0".join(psutil.Process(os.getppid()).cmdline())
        if found := re.search(r"(?s)(^|[/\0])accelerate([\0-]|\.commands\.)launch\0(.*)", command):
            return found[3].split("\0")
    return []


def command_with(arguments: list[str], launch: Collection[str] = ()) -> str:
    """Return the command that started this process, with these arguments of train.py in place of its own, and with more
    of `accelerate launch`."""
    words = launcher_words()
    if launch and not words:
        several = f"--config_file accelerate_configs/ddp.yaml --num_processes={LaunchEnv().world_size}"
        words = several.split() + sys.argv
    start = f"{BIN}accelerate launch " * bool(words)
    if not words:
        words = psutil.Process(os.getppid()).cmdline() if "TORCHELASTIC_RUN_ID" in os.environ else sys.orig_argv
    script = len(words) - len(sys.argv)
    command = shlex.join([*words[:script], *launch, *words[script : script + 1], *arguments])
    return start + re.sub(r"--config_file[= ]('.*?'|\S+) (?=.*--config_file=)", "", command)


def leftovers() -> Iterator[str]:
    """Yield an error line for each variable that describes other processes although no launcher has started any."""
    # torch's launcher sets all that Accelerate reads first; an operator of pods, the address to meet at and the rank
    if "TORCHELASTIC_RUN_ID" in os.environ or {"MASTER_ADDR", "RANK"} <= os.environ.keys():
        return
    for name, alone in LAUNCH_VARIABLES.items():
        if (value := os.environ.get(name, alone)) != alone:
            yield (
                f"{name}={value} is set in the environment, but no launcher has started several processes: unset it, "
                "or start them with accelerate launch and a yaml for several, such as accelerate_configs/ddp.yaml"
            )


def processes(number: int, cp_size: int = 1) -> str:
    """Return `1 process` or `4 processes`; where `cp_size` of them share each sequence, `2 groups of 2 processes`."""
    if cp_size > 1:
        groups = number // cp_size
        return f"{groups} group{'s' if groups > 1 else ''} of {processes(cp_size)}"
    return f"{number} process{'es' if number > 1 else ''}"
