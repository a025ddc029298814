"""The launcher above this process: its command, and the environment variables by which it tells a process what to
join."""

import contextlib
import os
import re
import shlex
import sys

import psutil

from src.config.terminal import BIN


class LaunchEnv:
    """What the launcher asks of this process, by environment variables; a single process without a launcher."""

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
        switches = ("ACCELERATE_USE_CPU", "ACCELERATE_USE_FSDP")
        self.cpu, self.fsdp = (os.environ.get(name, "").lower() == "true" for name in switches)
        self.precision = os.environ.get("ACCELERATE_MIXED_PRECISION", "no")
        """Mixed precision: no, bf16, fp16 or fp8."""


def _size(name: str) -> int:
    return max(1, int(os.environ.get(name) or 1))


def launcher_words() -> list[str]:
    """Return the words after `accelerate launch` of the process above this one; none if it is another."""
    with contextlib.suppress(psutil.Error):
        # words end with \0, which no word can have
        command = "\0".join(psutil.Process(os.getppid()).cmdline())
        if found := re.search(r"(?s)(^|[/\0])accelerate([\0-]|\.commands\.)launch\0(.*)", command):
            return found[3].split("\0")
    return []


def command_with(arguments: list[str]) -> str:
    """Return the command that started this process, with these arguments of train.py in place of its own."""
    words = launcher_words()
    start = f"{BIN}accelerate launch " * bool(words)
    if not words:
        words = psutil.Process(os.getppid()).cmdline() if "TORCHELASTIC_RUN_ID" in os.environ else sys.orig_argv
    script = len(words) - len(sys.argv)
    return start + shlex.join([*words[: script + 1], *arguments])


def processes(number: int, cp_size: int = 1) -> str:
    """Return `1 process` or `4 processes`; where `cp_size` of them share each sequence, `2 groups of 2 processes`."""
    if cp_size > 1:
        groups = number // cp_size
        return f"{groups} group{'s' if groups > 1 else ''} of {processes(cp_size)}"
    return f"{number} process{'es' if number > 1 else ''}"
