"""Data parallelism by hand, as the tutorials teach it, trains MNIST to the curve that DDP has."""

from pathlib import Path

import pytest

from tests.launching import BIN, MNIST, Launch, Rounding, Whole, needs_mnist, run_command

SETTINGS = ("--config=configs/mnist.yaml", "--max_steps=50", "--log_every=1", "--wandb.mode=disabled")


def shortened_mnist(folder: Path) -> Path:
    """Write MNIST with 500 test images, as both evaluations would take longer than the training."""
    for file in (MNIST / "MNIST" / "raw").glob("*-ubyte"):
        header, size = (16, 28 * 28) if "images" in file.name else (8, 1)
        content = file.read_bytes()
        if "t10k" in file.name:
            content = content[:4] + (500).to_bytes(4, "big") + content[8 : header + 500 * size]
        (folder / file.name).write_bytes(content)
    return folder


@pytest.mark.parametrize(
    "source",
    [
        pytest.param("mnist", marks=[needs_mnist, pytest.mark.slow]),
        "digits",  # two ends of an epoch among them
    ],
)
def test_by_hand_and_ddp_have_the_same_curve(
    launch: Launch, whole: Whole, rounding: Rounding, tmp_path: Path, source: str
) -> None:
    """With dropout, as both draw the same numbers. The rate is small, as in test_parity.py. Tried without `set_epoch`:
    the second epoch is another one."""
    data = [f"--task.source={source}"]
    data += ["--optim.lr=3e-5"] if source == "digits" else [f"--task.data_dir={shortened_mnist(tmp_path)}"]
    ddp, within = whole("ddp", *SETTINGS, *data), rounding("ddp", *SETTINGS, *data)
    run = launch("ddp", *SETTINGS, *data, f"--output_dir={tmp_path}/run", script="src/check/reference.py").succeeded()
    losses = [float(line.split()[-1]) for line in run.stdout.splitlines() if line.startswith("step ")]
    assert len(losses) == 50
    assert losses == pytest.approx(ddp.losses, rel=within)


@pytest.mark.slow
def test_its_mistakes_are_one_line_too(launch: Launch) -> None:
    """Of several processes, and by the command in its docstring."""
    torchrun = [str(BIN / "torchrun"), "--standalone", "--nproc-per-node=1", "-m", "src.check.reference", "--sed=1"]
    for run in (launch("ddp", "--sed=1", script="src/check/reference.py"), run_command(torchrun, MNIST)):
        assert [line for line in run.stderr.splitlines() if "sed=1" in line] == [
            "reference: --sed=1: unknown setting, did you mean seed?"
        ]
