"""The task stub_task trains alike on one process and on two, goes on after a stop, and exports what it trained."""

from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate.utils import set_seed
from safetensors.torch import load_file

from src.start import run_settings
from src.tasks.base import TaskState, samples
from tests.launching import Launch, Run, mistakes

SHORT = (
    "--task.name=stub_task", "--max_steps=8", "--log_every=1", "--global_batch_size=16", "--optim.lr=1e-4",
    "--optim.warmup_steps=0",
)  # fmt: skip
"""Add settings that turn off dropout, and that name what `write` writes: {folder} stands for its folder."""
LEARNS = ("--max_steps=60", "--optim.lr=3e-3")
MISTAKE = "--global_bach_size=16", "unknown setting, did you mean global_batch_size?"


def write(folder: Path) -> None:
    """Write a few rows, as the task reads them; nothing if it needs none."""


# the tests of every task
