"""--dry-run: the run as far as its first step, and nothing written."""

import shutil
from pathlib import Path

from tests.faults.runs import ALL, TINY, contents
from tests.launching import Launch, Whole


def test_a_dry_run_of_a_new_run_says_what_would_happen_and_leaves_nothing(launch: Launch, tmp_path: Path) -> None:
    """Tried with the lock, which makes the folders."""
    run = launch("fsdp", *TINY, "--dry-run", folder=tmp_path / "a/b", wandb="offline").succeeded()
    assert contents(tmp_path) == {}
    assert run.stderr == ""
    assert run.stdout.splitlines()[-1].startswith(
        "dry run: 14 of 14 steps to take, an evaluation every 8, a checkpoint"
    )
    assert ", 2 processes" in run.stdout
    assert f"output     {tmp_path}/a/b" in run.stdout


def test_a_dry_run_finds_and_loads_the_resume_point_and_touches_nothing(
    launch: Launch, whole: Whole, tmp_path: Path
) -> None:
    """Not even a damaged checkpoint, or the rest of an incomplete one. Tried with their removal. It refuses what a run
    would."""
    folder = tmp_path / "run"
    shutil.copytree(whole("ddp", *ALL).folder, folder)
    assert "finished: nothing to do" in launch("cpu", *TINY, "--dry-run", folder=folder).succeeded().stdout
    damaged = folder / "checkpoints" / "step_00000014"
    (damaged / "state.json").write_text("{}")
    (folder / "checkpoints" / "tmp_step_00000009").mkdir()
    before = contents(folder)
    run = launch("fsdp", *TINY, "--max_steps=20", "--dry-run", folder=folder).succeeded()
    assert f"passed over: {damaged}, state.json has " in run.stdout
    assert "after step 12, from" in run.stdout
    assert run.stdout.splitlines()[-1].startswith("dry run: 8 of 20 steps to take")
    other = launch("cpu", *TINY, "--optim.lr=1", "--dry-run", folder=folder)
    assert other.exit_code == 2
    assert "of a run with other settings: optim.lr" in other.messages[0]
    assert contents(folder) == before
