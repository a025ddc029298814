"""Gradients that are not finite: all processes skip the step together, and too many in a row end the run."""

import pytest

from tests.faults.runs import TINY, assert_equal, checkpoints, whole_tensors
from tests.launching import Launch, slow


@pytest.mark.parametrize("yaml", ["ddp", slow("fsdp")])
def test_one_process_with_nan_makes_all_skip_the_step_and_count_it(launch: Launch, yaml: str) -> None:
    """It leaves no trace in weights and optimizer. Tried without `accepts`: the weights become NaN."""
    arguments = (*TINY, "--max_steps=6", "--save_every=1", "--checkpoint.keep_last=3")
    run = launch(yaml, *arguments, FAULT="nan", FAULT_RANK="1", FAULT_STEP="5").succeeded()
    assert run.summary["skipped_steps"] == 1
    said = [line for line in run.stdout.splitlines() if line.startswith("WARNING: ")]
    assert said == ["WARNING: steps skipped so far because of non-finite gradients: 1"]
    (skipped,) = (record for record in run.records if record.get("train/loss", 0) is None)
    assert (skipped["step"], skipped["train/grad_norm"], skipped["train/skipped_steps"]) == (5, None, 1)
    before, after = (whole_tensors(run.folder / "checkpoints" / f"step_0000000{step}") for step in (4, 5))
    assert_equal(after, before)


def test_too_many_in_a_row_end_with_one_line_that_names_the_last_checkpoint(launch: Launch) -> None:
    """Tried without the limit: it trains on to the end, and says nothing."""
    run = launch("ddp", *TINY, "--max_bad_steps=3", FAULT="nan forever", FAULT_RANK="1", FAULT_STEP="5")
    assert run.exit_code != 0
    (line,) = run.messages
    assert "3 consecutive steps had non-finite gradients" in line
    assert str(run.folder / "checkpoints" / "step_00000004") in line
    assert checkpoints(run.folder) == [4]
