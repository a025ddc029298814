"""Data parallelism by hand, as the tutorials teach it, trains MNIST to the curve that DDP has."""

import pytest

from tests.launching import BIN, MNIST, Launch, Run, needs_mnist, run_command

SETTINGS = ("--config=configs/mnist.yaml", "--max_steps=50", "--log_every=1", "--wandb.mode=disabled")


def by_hand(processes: int, *arguments: str, folder: str) -> Run:
    command = [str(BIN / "torchrun"), f"--nproc-per-node={processes}", "--standalone", "-m", "src.reference"]
    return run_command([*command, *SETTINGS, *arguments, f"--output_dir={folder}"], MNIST)


@pytest.mark.parametrize(
    "data",
    [
        pytest.param((f"--task.data_dir={MNIST}", "--task.source=mnist"), marks=needs_mnist, id="mnist"),
        pytest.param(("--task.source=digits", "--optim.lr=1e-4"), id="digits"),  # two ends of an epoch among them
    ],
)
def test_by_hand_and_ddp_have_the_same_curve(launch: Launch, tmp_path: object, data: tuple[str, ...]) -> None:
    """With dropout, as both draw the same numbers. Tried without `set_epoch`: the second epoch is another one."""
    ddp = launch("ddp", *SETTINGS, *data).succeeded()
    run = launch("ddp", *SETTINGS, *data, f"--output_dir={tmp_path}/run", script="src/reference.py").succeeded()
    losses = [float(line.split()[-1]) for line in run.stdout.splitlines() if line.startswith("step ")]
    assert len(losses) == 50
    assert losses == pytest.approx(ddp.losses, rel=1e-5)
    accuracy = float(run.stdout.split()[-1])
    assert accuracy == pytest.approx(ddp.summary["eval/accuracy"], abs=1e-4)


def test_its_mistakes_are_one_line_too(tmp_path: object) -> None:
    run = by_hand(2, "--sed=1", folder=f"{tmp_path}/run")
    assert [line for line in run.stderr.splitlines() if "sed=1" in line] == [
        "reference: --sed=1: unknown setting, did you mean seed?"
    ]
