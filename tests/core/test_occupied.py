"""An output folder that holds another run, or that cannot be written to, is refused before anything is touched."""

import json
import os
import shutil
import socket
import subprocess
from pathlib import Path

import pytest
import yaml

from src.checkpoint import output_dir
from src.checkpoint.output_dir import lock, lock_run
from src.config.errors import UserError
from tests.faults.runs import ALL, TINY
from tests.launching import PROJECT, Whole, mistakes
from train import run_settings


@pytest.fixture(autouse=True)
def _in_an_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_a_folder_that_holds_a_run_is_refused_and_untouched() -> None:
    """Nor does a backup or an archive stand for a checkpoint. Tried with all names that begin so: it starts over."""
    folder = Path("runs/mnist")
    for name in ("config.yaml", "metrics.jsonl", "summary.json", "model"):
        shutil.rmtree(folder, ignore_errors=True)
        (folder / "checkpoints/step_00000030.bak").mkdir(parents=True)
        (folder / "checkpoints/step_00000040").touch()
        (folder / name).write_text("precious")
        assert mistakes() == [
            f"output_dir=runs/mnist: already holds a run ({name}, checkpoints), but no checkpoint of it; choose "
            "another --run_name or --output_dir, or move that folder away"
        ]
        assert (folder / name).read_text() == "precious"


@pytest.mark.parametrize("resume", ["auto", "never"])
def test_folders_made_in_advance_are_a_new_run(resume: str) -> None:
    """Or links to some. Tried without: "already holds a run"."""
    Path("runs/mnist/wandb").mkdir(parents=True)
    Path("disk/lost+found").mkdir(parents=True)
    Path("runs/mnist/checkpoints").symlink_to(Path("disk").absolute())
    run_settings([f"--resume={resume}"])
    Path("disk/tmp_step_00000005").mkdir()
    assert "already holds a run (checkpoints)" in mistakes(f"--resume={resume}")[0]


@pytest.mark.parametrize(
    "link", ["", "/mnist", "/mnist/checkpoints", "/mnist/checkpoints/step_00000008", "/mnist/metrics.jsonl"]
)
def test_a_link_to_a_disk_that_is_not_mounted(link: str) -> None:
    """Tried without: a run whose checkpoints are elsewhere starts over, or ends in a traceback."""
    Path(f"runs{link}").parent.mkdir(parents=True, exist_ok=True)
    Path(f"runs{link}").symlink_to("/nowhere/disk")
    assert f"runs{link}, No such file or directory; choose another --run_name or --output_dir" in mistakes()[-1]


def test_a_run_does_not_start_over_where_its_checkpoints_went_away() -> None:
    """Its status.json says that there were some. Tried without: it does."""
    folder = Path("runs/mnist")
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text(yaml.safe_dump(run_settings(["--save_every=8"]).model_dump(mode="json")))
    (folder / "status.json").write_text('{"status": "unfinished", "checkpoint": null}')
    run_settings(["--save_every=8"])  # it never could save
    (folder / "status.json").write_text('{"status": "preempted", "checkpoint": "runs/mnist/checkpoints/step_5"}')
    assert mistakes("--save_every=8") == [
        "output_dir=runs/mnist: its checkpoints are missing: restore runs/mnist/checkpoints; "
        "or choose another --run_name or --output_dir, or move that folder away"
    ]


def test_an_output_folder_that_cannot_be_written() -> None:
    """/proc is one even for root, who runs CI and may write anywhere else."""
    assert mistakes("--output_dir=/proc/a/b")[0].startswith("output_dir=/proc/a/b: cannot write to /proc, ")
    (line,) = mistakes("--output_dir=/proc/version/x")
    assert line.endswith("/x: cannot write to /proc/version, Not a directory; choose another --output_dir")
    with pytest.raises(UserError, match="cannot be locked, .*File name too long"):
        lock(Path("x" * 300))


def test_what_is_another_users_in_the_folder_is_refused_at_the_start() -> None:
    """Stood for by what even root can't write. Tried without: summary.json is deleted, then a traceback."""
    Path("runs/mnist").mkdir(parents=True)
    with socket.socket(socket.AF_UNIX) as unwritable:
        unwritable.bind("runs/mnist/metrics.jsonl")
    assert "cannot write to runs/mnist/metrics.jsonl, " in mistakes()[-1]
    Path("runs/mnist/metrics.jsonl").unlink()
    Path("runs/mnist/checkpoints").symlink_to("/proc")
    assert "cannot write to runs/mnist/checkpoints, " in mistakes()[-1]


def test_a_folder_takes_no_branch_of_a_checkpoint_before_its_own(whole: Whole) -> None:
    """Tried without comparing with the newest checkpoint of its own: what came after is overwritten."""
    folder = whole("cpu", *ALL).folder
    own = (*TINY, "--task.source=digits", f"--output_dir={folder}")
    source = f"--resume={folder}/checkpoints/step_00000012"
    assert "whose newest checkpoint is not" in mistakes(*own, source)[0]
    assert mistakes(*own, f"{source}x")[0].endswith("not a checkpoint; auto, never, or a folder step_…")
    assert "already holds a run" in mistakes(*own, "--resume=never")[0]


def test_one_run_is_written_by_one_process(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Tried with a lock that can be shared."""
    monkeypatch.setattr(output_dir, "PATIENCE_SECONDS", 1)
    lock(tmp_path)
    with pytest.raises(ValueError, match="another process is writing this run"):
        lock(tmp_path)


def test_runs_whose_checkpoints_are_in_one_place_are_not_written_at_once(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Each would delete the other's. Tried with the lock of the run's folder alone."""
    monkeypatch.setattr(output_dir, "PATIENCE_SECONDS", 1)
    (tmp_path / "disk").mkdir()
    for name in ("one", "other"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "checkpoints").symlink_to(tmp_path / "disk")
    lock_run(tmp_path / "one")
    with pytest.raises(UserError, match="other/checkpoints: another process is writing this run"):
        lock_run(tmp_path / "other")


NOT_DONE = "runs/{} is not done: resuming it; to start another run, add --run_name=NAME to ARGS\n"


@pytest.mark.parametrize(
    ("found", "arguments", "chosen", "says"),
    [
        ({}, "", "digits", False),
        ({"digits": "preempted"}, "", "digits", True),
        ({"digits": "preempted"}, "--check", "digits", False),
        ({"digits": "preempted"}, "--seed=1 --run_name=x", "digits", False),  # x, as the last one counts
        ({"digits": "done"}, "", "digits-2", False),
        ({"digits": None}, "", "digits", False),  # a report of --check alone
        ({"digits": "done", "digits-2": "unfinished"}, "--seed=1", "digits-2", True),
        ({"digits": "preempted", "digits-2": "preempted"}, "", "digits-2", True),
        ({"digits": "unfinished", "digits-2": "done"}, "", "digits", True),
        ({"digits": "done", **{f"digits-{n}": "done" for n in range(2, 11)}}, "", "digits-11", False),
        ({"digits-of-mine": "unfinished"}, "", "digits", False),
    ],
)
def test_make_resumes_the_newest_run_that_is_not_done(
    tmp_path: Path, found: dict[str, str | None], arguments: str, chosen: str, says: bool
) -> None:
    """And begins another under a new name once all are done. With an `accelerate` that only prints what it is called
    with. Tried with the first free name, as before, and with a look at config.yaml in place of status.json."""
    for name in ("Makefile", "pyproject.toml", "requirements.txt", "requirements-dev.txt"):
        shutil.copy(PROJECT / name, tmp_path)
    (tmp_path / ".venv/bin").mkdir(parents=True)
    for file in ("bin/pytest", "bin/accelerate", "installed"):
        (tmp_path / ".venv" / file).write_text("#!/bin/sh\necho $*\n")
        (tmp_path / ".venv" / file).chmod(0o755)
    for name, status in found.items():
        (folder := tmp_path / "runs" / name).mkdir(parents=True)
        if status:
            (folder / "status.json").write_text(json.dumps({"status": status}, indent=2))
    environment = {"PATH": os.environ["PATH"]}  # without what the `make` that runs the tests was given
    command = ["make", "train", f"ARGS={arguments}"]
    printed = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=True).stdout
    *before, called = printed.splitlines(keepends=True)
    assert called.split("--run_name=")[1].split() == [chosen, *arguments.partition("--run_name=")[0].split()]
    assert before == ([NOT_DONE.format(chosen)] if says else [])
