"""Runs of train.py as a user starts them, each in fresh processes, and what they write down about themselves."""

import contextlib
import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import psutil

PROJECT = Path(__file__).parent.parent


@dataclass(frozen=True)
class Run:
    """What a run wrote down about itself."""

    summary: dict[str, Any]
    records: list[dict[str, Any]]
    """Those of the training, without evaluations."""


def launch_command(yaml: str, processes: int) -> list[str]:
    launcher = [str(Path(sys.executable).parent / "accelerate"), "launch", "--main_process_port=0"]
    return [*launcher, f"--config_file=accelerate_configs/{yaml}.yaml", f"--num_processes={processes}"]


def environment(threads: int = 1) -> dict[str, str]:
    """Without GPUs, and without what a user's shell says to W&B and Accelerate."""
    env = {name: value for name, value in os.environ.items() if not name.startswith(("WANDB_", "ACCELERATE_", "FSDP_"))}
    return env | {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": str(threads), "HF_HUB_OFFLINE": "1"}


def launched(command: list[str], threads: int = 1, is_shown: bool = False) -> str:
    """Returns: what it prints, but where it `is_shown`."""
    done = subprocess.run(command, cwd=PROJECT, env=environment(threads), capture_output=not is_shown, text=True)
    if done.returncode:
        sys.exit(f"{' '.join(command)}\n{done.stdout}{done.stderr}\nended with exit code {done.returncode}")
    return done.stdout


def signal_all(process: psutil.Process, number: int) -> None:
    """Also its children: launchers give theirs groups of their own."""
    for one in (*process.children(recursive=True), process):
        with contextlib.suppress(psutil.NoSuchProcess):
            one.send_signal(number)


def arguments(settings: dict[str, Any]) -> list[str]:
    return [f"--{name}={value}" for name, value in settings.items()]


def read_run(output: Path) -> Run:
    records = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
    summary = json.loads((output / "summary.json").read_text())
    return Run(summary, [record for record in records if "train/loss" in record])


def write_images(folder: Path, count: int) -> None:
    """As MNIST's files."""
    random = np.random.default_rng(0)
    folder.mkdir()
    for name, size in (("train", count), ("t10k", 100)):
        images = random.integers(0, 256, (size, 28, 28), np.uint8)
        for kind, magic, values in (("images-idx3", 2051, images), ("labels-idx1", 2049, random.integers(0, 10, size))):
            head = np.array([magic, *values.shape], dtype=">i4").tobytes()
            (folder / f"{name}-{kind}-ubyte").write_bytes(head + values.astype(np.uint8).tobytes())
