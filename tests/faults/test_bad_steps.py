"""Gradients that are not finite: all processes skip the step together, and too many in a row end the run."""

import pytest
import torch

from tests.conftest import Launch
from tests.faults.runs import INJECT, SHORT, checkpoints, weights

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")  # in this process, to read

PLAIN = ("--task.dropout=0", "--optim.schedule=constant", "--optim.warmup_steps=0", "--optim.lr=1e-4")


@pytest.mark.parametrize(("yaml", "processes"), [("ddp", 2), ("fsdp", 2), ("cpu", 1)])
def test_one_process_with_nan_makes_all_skip_the_step_and_count_it(launch: Launch, yaml: str, processes: int) -> None:
    """Tried without `accepts`: the weights become NaN."""
    rank = str(processes - 1)
    run = launch(yaml, *SHORT, script=INJECT, FAULT="nan", FAULT_RANK=rank, FAULT_STEP="12").succeeded()
    assert run.summary["skipped_steps"] == 1
    (skipped,) = (record for record in run.records if record.get("train/loss", 0) is None)
    assert (skipped["step"], skipped["train/grad_norm"], skipped["train/skipped_steps"]) == (12, None, 1)
    assert len(run.losses) == 30
    assert all(weight.isfinite().all() for weight in weights(run).values())


def test_a_skipped_step_leaves_no_trace_in_weights_and_optimizer(launch: Launch) -> None:
    """Weight decay and momentum would show in the weights, were the step taken with gradients of zero."""
    arguments = (*PLAIN, "--log_every=1", "--save_every=1", "--checkpoint.keep_last=10", "--max_steps=5")
    run = launch("ddp", *arguments, script=INJECT, FAULT="nan", FAULT_RANK="1", FAULT_STEP="4").succeeded()
    from src.checkpoint.tensors import read, saved_tensors

    before, after = (run.folder / "checkpoints" / f"step_0000000{step}" for step in (3, 4))
    for name, facts in saved_tensors(before).items():
        one, other = (torch.empty(facts.size) for _ in range(2))
        read(before, {name: one})
        read(after, {name: other})
        assert torch.equal(one, other), name


def test_too_many_in_a_row_end_with_one_line_that_names_the_last_checkpoint(launch: Launch) -> None:
    """And resumed without the fault the run goes on from it."""
    arguments = (*SHORT, "--max_bad_steps=3")
    run = launch("ddp", *arguments, script=INJECT, FAULT="nan forever", FAULT_RANK="1", FAULT_STEP="10")
    assert run.exit_code != 0
    (line,) = run.messages
    assert "3 steps in a row" in line
    assert str(run.folder / "checkpoints" / "step_00000008") in line
    assert "Traceback (most recent call last)" not in run.stderr.split("train.py: ")[0]
    assert checkpoints(run.folder) == [8]
    assert launch("ddp", *arguments, folder=run.folder).succeeded().summary["skipped_steps"] == 0
