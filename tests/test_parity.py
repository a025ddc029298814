"""The same curve on 1, 2 or 4 processes, DDP or FSDP: every training loss within 1e-5, relative.

The learning rate is small here, as it is in the first steps of a real run, and rounding doesn't grow: of 15 changes of
the weights by an ulp, none moved a loss by more than 2.3e-7 (at 1e-4, one in seven did, by up to 3e-6). At its peak,
training is chaotic: what rounding makes of the order of a sum doubles every few steps, in plain PyTorch too
(docs/promises.md). So the bounds are measured where the tests run: see the fixture `rounding`.
"""

import pytest
import torch

from tests.launching import MNIST, Launch, Rounding, Run, Whole, needs_mnist, slow

# 1,438 digits make 22 windows of 64 and one of 30, of which two of four processes get 7: with micro-batches of 1, their
# last is empty. 50 steps pass two such ends of an epoch. (The shift stays on: it must not depend on processes.)
CURVE = ("--max_steps=50", "--log_every=1", "--task.dropout=0")
DIGITS = (*CURVE, "--optim.lr=3e-5", "--optim.max_grad_norm=1")
REAL = (*CURVE, f"--task.data_dir={MNIST}", "--task.source=mnist")


NORM = "train/grad_norm"
"""A ReLU that rounding flips changes it at once, a loss later: it drifts by 6e-6 here."""


def norms(run: Run) -> list[float]:
    return [record[NORM] for record in run.records if NORM in record]


def assert_same_curve(run: Run, examples: int, whole: Whole, rounding: Rounding, *arguments: str) -> None:
    """As that of one process with these arguments. So many examples are evaluated."""
    alone, within = whole("cpu", *arguments), rounding("cpu", *arguments)
    assert len(alone.losses) == 50
    assert run.losses == pytest.approx(alone.losses, rel=within)
    assert norms(run)[:10] == pytest.approx(norms(alone)[:10], rel=rounding("cpu", *arguments, name=NORM))
    found, expected = ({n: v for n, v in r.summary.items() if n.startswith("eval/")} for r in (run, alone))
    assert found == expected | {
        "eval/examples": examples,
        "eval/loss": pytest.approx(expected["eval/loss"], rel=within),
    }


@pytest.mark.parametrize(
    ("yaml", "processes", "micro_batch_size"),
    [
        ("ddp", 4, 4), ("fsdp", 2, 16), ("hsdp", 4, 16), slow("cpu", 1, 16), slow("ddp", 4, 1), slow("ddp", 2, 4),
        slow("fsdp", 4, 4), slow("fsdp_grad_op", 2, 16), slow("fsdp_offload", 2, 16),
    ],
)  # fmt: skip
def test_digits_with_accumulation_clipping_and_ragged_windows(
    launch: Launch, whole: Whole, rounding: Rounding, yaml: str, processes: int, micro_batch_size: int
) -> None:
    run = launch(yaml, *DIGITS, f"--micro_batch_size={micro_batch_size}", processes=processes).succeeded()
    strategy = yaml.replace("cpu", "single")
    assert (run.summary["strategy"], run.summary["num_processes"]) == (strategy, processes)
    assert_same_curve(run, 359, whole, rounding, *DIGITS)


@pytest.mark.slow
def test_gradients_in_bf16_on_their_way_change_the_curve_by_their_rounding(
    launch: Launch, whole: Whole, rounding: Rounding
) -> None:
    """Above what fp32's own makes of the norms, and below the eight bits of bf16. Tried without the hook: no more."""
    alone, run = whole("cpu", *DIGITS), launch("ddp_bf16_hook", "--ddp_comm_hook=bf16", *DIGITS).succeeded()
    assert norms(run) != pytest.approx(norms(alone), rel=rounding("cpu", *DIGITS, name=NORM))
    assert run.losses == pytest.approx(alone.losses, rel=torch.finfo(torch.bfloat16).eps)


@needs_mnist
@pytest.mark.slow
@pytest.mark.parametrize(
    ("yaml", "processes"),
    [("fsdp", 2), ("ddp", 2), ("ddp", 4), ("fsdp", 4), ("fsdp_grad_op", 2), ("fsdp_offload", 2)],
)
def test_mnist(launch: Launch, whole: Whole, rounding: Rounding, yaml: str, processes: int) -> None:
    assert_same_curve(launch(yaml, *REAL, processes=processes).succeeded(), 10_000, whole, rounding, *REAL)
