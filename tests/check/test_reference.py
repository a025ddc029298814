"""Data parallelism by hand, as the tutorials teach it, trains MNIST's CNN to the curve that DDP has."""

from pathlib import Path

import pytest

from tests.launching import QUIET, Launch, Whole

SETTINGS = ("--config=configs/mnist.yaml", "--task.source=digits", "--optim.lr=3e-5", "--max_steps=25",
            "--log_every=1", *QUIET)  # fmt: skip
"""The end of an epoch is among the steps."""


def test_by_hand_and_ddp_have_the_same_curve(launch: Launch, whole: Whole, tmp_path: Path) -> None:
    """With dropout, as both draw the same numbers. Tried without `set_epoch`: the second epoch is another one."""
    run = launch("ddp", *SETTINGS, f"--output_dir={tmp_path}/run", script="src/check/reference.py").succeeded()
    losses = [float(line.split()[-1]) for line in run.stdout.splitlines() if line.startswith("step ")]
    assert len(losses) == 25
    assert losses == pytest.approx(whole("ddp", *SETTINGS).losses, rel=1e-5)
