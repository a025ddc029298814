"""The same curve on 1, 2 or 4 processes, DDP or FSDP: every training loss within 1e-5, relative.

The learning rate is small here, as it is in the first steps of a real run. At its peak, training is chaotic: what
rounding makes of the order of a sum doubles every few steps, in plain PyTorch too (docs/promises.md).
"""

import pytest
from safetensors.torch import load_file

from tests.launching import MNIST, Launch, Run, Whole, needs_mnist, slow

# 1,438 digits make 22 windows of 64 and one of 30, of which four processes with micro-batches of 4 get 4, 4 and at
# last an empty one: 50 steps pass two such ends of an epoch. (The shift stays on: it must not depend on processes.)
CURVE = ("--max_steps=50", "--log_every=1", "--task.dropout=0")
DIGITS = (*CURVE, "--optim.lr=1e-4", "--optim.max_grad_norm=1")
REAL = (*CURVE, f"--task.data_dir={MNIST}", "--task.source=mnist")


def norms(run: Run) -> list[float]:
    return [record["train/grad_norm"] for record in run.records if "train/grad_norm" in record]


def assert_same_curve(run: Run, alone: Run, examples: int) -> None:
    assert len(run.losses) == len(alone.losses) == 50
    assert run.losses == pytest.approx(alone.losses, rel=1e-5)
    weights, expected = (load_file(r.folder / "model" / "model.safetensors") for r in (run, alone))
    assert weights.keys() == expected.keys()
    for name, weight in weights.items():  # in norm: AdamW turns the rounding of a gradient near 0 into a whole step
        assert (weight - expected[name]).norm() <= 1e-3 * expected[name].norm(), name
    assert norms(run)[:10] == pytest.approx(norms(alone)[:10], rel=1e-5)
    assert run.summary["eval/examples"] == alone.summary["eval/examples"] == examples
    assert run.summary["eval/accuracy"] == alone.summary["eval/accuracy"]
    assert run.summary["eval/loss"] == pytest.approx(alone.summary["eval/loss"], rel=1e-5)


@pytest.mark.parametrize(
    ("yaml", "processes", "micro_batch_size"),
    [
        ("cpu", 1, 16), slow("ddp", 2, 4), ("ddp", 4, 4), ("fsdp", 2, 16), slow("fsdp", 4, 4), ("fsdp", 4, 16),
        ("fsdp_grad_op", 2, 16), ("fsdp_offload", 2, 16), ("hsdp", 4, 16),
    ],
)  # fmt: skip
def test_digits_with_accumulation_clipping_and_ragged_windows(
    launch: Launch, whole: Whole, yaml: str, processes: int, micro_batch_size: int
) -> None:
    run = launch(yaml, *DIGITS, f"--micro_batch_size={micro_batch_size}", processes=processes).succeeded()
    strategy = yaml.replace("cpu", "single")
    assert (run.summary["strategy"], run.summary["num_processes"]) == (strategy, processes)
    assert_same_curve(run, whole("cpu", *DIGITS), 359)


def test_gradients_in_bf16_on_their_way_change_the_curve_by_their_rounding(launch: Launch, whole: Whole) -> None:
    alone = whole("cpu", *DIGITS)
    losses = launch("ddp_bf16_hook", "--ddp_comm_hook=bf16", *DIGITS).succeeded().losses
    assert losses != pytest.approx(alone.losses, rel=1e-5)
    assert losses == pytest.approx(alone.losses, rel=2e-2)


@pytest.mark.slow
def test_three_processes_agree_too(launch: Launch) -> None:
    arguments = [*DIGITS, "--global_batch_size=60"]
    assert_same_curve(launch("fsdp", *arguments, processes=3).succeeded(), launch("cpu", *arguments).succeeded(), 359)


@needs_mnist
@pytest.mark.slow
@pytest.mark.parametrize(
    ("yaml", "processes"),
    [("fsdp", 2), ("ddp", 2), ("ddp", 4), ("fsdp", 4), ("fsdp_grad_op", 2), ("fsdp_offload", 2)],
)
def test_mnist(launch: Launch, whole: Whole, yaml: str, processes: int) -> None:
    assert_same_curve(launch(yaml, *REAL, processes=processes).succeeded(), whole("cpu", *REAL), 10_000)
