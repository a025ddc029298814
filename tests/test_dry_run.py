"""--dry-run: the run as far as its first step, and nothing written."""

import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.utils.data import default_collate

from src.tasks.mnist import Mnist
from src.tracking.summary import MOST_CHARACTERS, shown
from tests.faults.runs import ALL, TINY, contents
from tests.launching import Launch, Whole


def order(epoch: int) -> np.ndarray:
    """Of the bundled digits, with seed 0."""
    return np.random.default_rng([0, epoch]).permutation(1438)


def digit(task: Mnist, index: int) -> str:
    """As the first epoch sees it, moved by augmentation."""
    return task.preview(task.augmented(task.build_datasets()[0], [0, 0, 1]), index)


def test_a_dry_run_of_a_new_run_says_what_would_happen_and_leaves_nothing(launch: Launch, tmp_path: Path) -> None:
    """Tried with the lock, which makes the folders."""
    run = launch("fsdp", *TINY, "--dry-run", folder=tmp_path / "a/b", wandb="offline").succeeded()
    assert contents(tmp_path) == {}
    assert run.stderr == ""
    assert run.stdout.splitlines()[-1].startswith("dry run: 14 of 14 steps to take, evaluating every 8, saving")
    assert ", 2 processes" in run.stdout
    assert f"output     {tmp_path}/a/b" in run.stdout
    task = Mnist(source="digits")
    first = [f"training example {i}, in step 1:\n{digit(task, i)}" for i in order(epoch=0)[:2]]
    assert "\n\n".join(first) in run.stdout


def test_a_dry_run_loads_the_resume_point_and_touches_nothing(launch: Launch, whole: Whole, tmp_path: Path) -> None:
    """Not even a damaged checkpoint: tried with their removal. It refuses what a run would."""
    folder = tmp_path / "run"
    shutil.copytree(whole("ddp", *ALL).folder, folder)
    assert "this run has finished" in launch("cpu", *TINY, "--dry-run", folder=folder).succeeded().stdout
    damaged = folder / "checkpoints" / "step_00000014"
    (damaged / "state.json").write_text("{}")
    (folder / "checkpoints" / "tmp_step_00000009").mkdir()
    before = contents(folder)
    run = launch("fsdp", *TINY, "--max_steps=20", "--dry-run", folder=folder).succeeded()
    assert f"skipped: {damaged}, state.json has " in run.stdout
    assert "after step 12, from" in run.stdout
    assert run.stdout.splitlines()[-1].startswith("dry run: 8 of 20 steps to take")
    assert f"training example {order(epoch=0)[12 * 16]}, in step 13:" in run.stdout
    other = launch("cpu", *TINY, "--optim.lr=1", "--dry-run", folder=folder)
    assert other.exit_code == 2
    assert "of a run with other settings: optim.lr" in other.messages[0]
    assert contents(folder) == before


def test_an_example_is_shown_by_its_names_shapes_types_and_values(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tried without the case of no elements: torch refuses to take their minimum."""
    monkeypatch.setattr(Mnist, "collate", lambda _, samples: default_collate(samples))
    example = {"x": np.arange(5) / 8, "at": {"n": 3}, "boxes": torch.zeros(0, 4)}
    shown = '{ "x": "torch.float64 (5,), 0 to 0.5", "at": { "n": 3 }, "boxes": [] }'
    assert " ".join(Mnist().preview([example], 0).split()) == shown


def test_what_contributes_is_green_in_a_terminal_and_in_brackets_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    assert shown("a⟦b⟧c") == "a⟦b⟧c"  # pytest captures the output
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    assert shown("a⟦b⟧c") == "a\x1b[32mb\x1b[0mc"
    monkeypatch.setenv("TERM", "dumb")
    assert shown("a⟦b⟧c") == "a⟦b⟧c"
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("NO_COLOR", "1")
    assert shown("a⟦b⟧c") == "a⟦b⟧c"


def test_a_long_text_is_cut_with_what_was_left_out_and_cannot_control_the_terminal() -> None:
    """Tried without closing the mark: all that follows is green."""
    text = "x" * 10 + "⟦" + "y" * 9000 + "⟧z"
    assert shown(text) == text[:MOST_CHARACTERS] + f"⟧\n… and {9013 - MOST_CHARACTERS:,} more characters"
    assert shown("a\tb\n\x1b]0;title\x07\r\x9b2J") == "a\tb\n\ufffd]0;title\ufffd\ufffd\ufffd2J"
