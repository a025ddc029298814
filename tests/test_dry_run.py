"""--dry-run: the run as far as its first step, and nothing written."""

import hashlib
from pathlib import Path

import pytest

from tests.launching import Launch, slow

SHORT = ("--max_steps=6", "--log_every=2", "--eval_every=3", "--save_every=3", "--task.source=digits")


def tree(folder: Path) -> dict[str, str]:
    """Checksums of all files, and the folders."""
    files = {file: file.read_bytes() if file.is_file() else b"" for file in folder.rglob("*")}
    return {str(file.relative_to(folder)): hashlib.sha256(content).hexdigest() for file, content in files.items()}


@pytest.mark.parametrize(("yaml", "processes"), [slow("cpu", 1), slow("ddp", 2), ("fsdp", 2)])
def test_a_dry_run_of_a_new_run_says_what_would_happen_and_leaves_nothing(
    launch: Launch, tmp_path: Path, yaml: str, processes: int
) -> None:
    """Tried with the lock, which makes the folders."""
    run = launch(yaml, *SHORT, "--dry-run", folder=tmp_path / "a/b", processes=processes, wandb="offline").succeeded()
    assert tree(tmp_path) == {}
    assert run.stderr == ""
    assert run.stdout.splitlines()[-1].startswith("dry run: 6 of 6 steps to take, an evaluation every 3, a checkpoint")
    assert f", {processes} process" in run.stdout
    assert f"output     {tmp_path}/a/b" in run.stdout


def test_a_dry_run_finds_and_loads_the_resume_point_and_touches_nothing(launch: Launch, tmp_path: Path) -> None:
    """Not even a damaged checkpoint, or the rest of an incomplete one. Tried with their removal. It refuses what a run
    would."""
    folder = tmp_path / "run"
    launch("ddp", *SHORT, folder=folder, processes=2).succeeded()
    assert "finished: nothing to do" in launch("cpu", *SHORT, "--dry-run", folder=folder).succeeded().stdout
    damaged = sorted((folder / "checkpoints").iterdir())[-1]
    (damaged / "state.json").write_text("{}")
    (folder / "checkpoints" / "tmp_step_00000009").mkdir()
    before = tree(tmp_path)
    run = launch("fsdp", *SHORT, "--max_steps=8", "--dry-run", folder=folder, processes=2).succeeded()
    assert f"passed over: {damaged}, state.json has " in run.stdout
    assert "after step 3, from" in run.stdout
    assert run.stdout.splitlines()[-1].startswith("dry run: 5 of 8 steps to take")
    other = launch("cpu", *SHORT, "--optim.lr=1", "--dry-run", folder=folder)
    assert other.exit_code == 2
    assert "of a run with other settings: optim.lr" in other.messages[0]
    assert tree(tmp_path) == before
