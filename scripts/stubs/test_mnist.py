"""Digits: one process and two train alike, a stopped run goes on, and what was trained is exported."""

from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate.utils import set_seed
from safetensors.torch import load_file

from src.config.errors import UserError
from src.start import run_settings
from src.tasks.base import TaskState, samples
from tests.launching import Launch, Run, mistakes

SHORT = (
    "--task.name=mnist", "--task.source=digits", "--task.dropout=0", "--max_steps=8", "--log_every=1",
    "--global_batch_size=250", "--optim.lr=1e-4", "--optim.warmup_steps=0",
)  # fmt: skip
"""An epoch has six steps, the last of 188 digits."""
LEARNS = ("--max_steps=40", "--optim.lr=3e-3")
MISTAKE = "--task.dropuot=0.1", "unknown setting, did you mean task.dropout?"


def write(folder: Path) -> None:
    """Nothing: scikit-learn comes with the digits."""


# the tests of every task


def test_damaged_files_are_one_line(tmp_path: Path) -> None:
    folder = tmp_path / "MNIST/raw"
    folder.mkdir(parents=True)
    for part in ("train-images-idx3", "train-labels-idx1", "t10k-images-idx3", "t10k-labels-idx1"):
        (folder / f"{part}-ubyte").write_bytes(b"<html>")
    task = run_settings(["--task.name=mnist", f"--task.data_dir={tmp_path}", f"--output_dir={tmp_path}/run"]).task
    with pytest.raises(UserError, match="MNIST could be neither read from .* nor downloaded"):
        task.build_datasets()
