"""An output folder that holds another run, or is not writable, is refused before anything is touched."""

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

FOLDER = Path("runs/mnist")


@pytest.fixture(autouse=True)
def _in_an_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize("name", ["config.yaml", "metrics.jsonl", "summary.json", "model"])
def test_a_folder_that_holds_a_run_is_refused_and_untouched(name: str) -> None:
    """Backups and archives do not pass for checkpoints."""
    (FOLDER / "checkpoints/step_00000030.bak").mkdir(parents=True)
    (FOLDER / "checkpoints/step_00000040").touch()
    (FOLDER / name).write_text("precious")
    (line,) = mistakes()
    assert line.startswith(f"output_dir=runs/mnist: already holds a run ({name}, checkpoints), but no checkpoint of it")
    assert (FOLDER / name).read_text() == "precious"


@pytest.mark.parametrize("resume", ["auto", "never"])
def test_folders_made_in_advance_are_a_new_run(resume: str) -> None:
    (FOLDER / "wandb").mkdir(parents=True)
    Path("disk/lost+found").mkdir(parents=True)
    (FOLDER / "checkpoints").symlink_to(Path("disk").absolute())
    run_settings([f"--resume={resume}"])
    Path("disk/tmp_step_00000005").mkdir()
    assert "already holds a run (checkpoints)" in mistakes(f"--resume={resume}")[0]


@pytest.mark.parametrize(
    "link", ["", "/mnist", "/mnist/checkpoints", "/mnist/checkpoints/step_00000008", "/mnist/metrics.jsonl"]
)
def test_a_disk_that_is_not_mounted_is_refused(link: str) -> None:
    Path(f"runs{link}").parent.mkdir(parents=True, exist_ok=True)
    Path(f"runs{link}").symlink_to("/nowhere/disk")
    assert f"runs{link}, No such file or directory; choose another --run_name or --output_dir" in mistakes()[-1]


def test_a_run_whose_checkpoints_are_missing_does_not_start_over() -> None:
    FOLDER.mkdir(parents=True)
    (FOLDER / "config.yaml").write_text(yaml.safe_dump(run_settings(["--save_every=8"]).model_dump(mode="json")))
    (FOLDER / "status.json").write_text('{"status": "unfinished", "checkpoint": null}')
    run_settings(["--save_every=8"])  # it has saved none
    (FOLDER / "status.json").write_text('{"status": "preempted", "checkpoint": "runs/mnist/checkpoints/step_5"}')
    (line,) = mistakes("--save_every=8")
    assert line.startswith("output_dir=runs/mnist: its checkpoints are missing: restore runs/mnist/checkpoints; or ")


def test_an_output_folder_that_is_not_writable_is_refused() -> None:
    """Root may write anywhere but into /proc and to sockets, which stand for another user's files."""
    assert mistakes("--output_dir=/proc/a/b")[0].startswith("output_dir=/proc/a/b: cannot write to /proc, ")
    (line,) = mistakes("--output_dir=/proc/version/x")
    assert line.endswith("/x: cannot write to /proc/version, Not a directory; choose another --output_dir")
    with pytest.raises(UserError, match=r"cannot be locked, .*File name too long"):
        lock(Path("x" * 300))
    FOLDER.mkdir(parents=True)
    with socket.socket(socket.AF_UNIX) as unwritable:
        unwritable.bind("runs/mnist/metrics.jsonl")
    (FOLDER / "checkpoints").symlink_to("/proc")
    refused = "\n".join(mistakes())
    assert "cannot write to runs/mnist/metrics.jsonl, " in refused
    assert "cannot write to runs/mnist/checkpoints, " in refused


def test_a_folder_takes_no_branch_of_an_older_checkpoint_of_its_own(whole: Whole) -> None:
    folder = whole("cpu", *ALL).folder
    own = (*TINY, "--task.source=digits", f"--output_dir={folder}")
    source = f"--resume={folder}/checkpoints/step_00000012"
    assert "whose newest checkpoint is not" in mistakes(*own, source)[0]
    assert mistakes(*own, f"{source}x")[0].endswith("not a checkpoint; auto, never, or a folder step_…")
    assert "already holds a run" in mistakes(*own, "--resume=never")[0]


def test_a_run_and_its_checkpoints_are_written_by_one_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two runs whose `checkpoints` lead to the same disk would delete each other's."""
    monkeypatch.setattr(output_dir, "PATIENCE_SECONDS", 1)
    Path("disk").mkdir()
    for name in ("one", "other"):
        Path(name).mkdir()
        Path(name, "checkpoints").symlink_to(Path("disk").absolute())
    lock_run(Path("one"))
    for name, locked in (("one", "one"), ("other", "other/checkpoints")):
        with pytest.raises(UserError, match=f"={locked}: another process is writing this run"):
            lock_run(Path(name))


@pytest.mark.parametrize(
    ("found", "arguments", "chosen", "resumes"),
    [
        ({}, "", "digits", False),
        ({"digits": "preempted"}, "", "digits", True),
        ({"digits": "preempted"}, "--check", "digits", False),
        ({"digits": "preempted"}, "--seed=1 --run_name=x", "digits", False),  # x: the last --run_name counts
        ({"digits": "done"}, "", "digits-2", False),
        ({"digits": None}, "", "digits", False),  # has only a report of --check
        ({"digits": "done", "digits-2": "unfinished"}, "--seed=1", "digits-2", True),
        ({"digits": "preempted", "digits-2": "preempted"}, "", "digits-2", True),
        ({"digits": "unfinished", "digits-2": "done"}, "", "digits", True),
        ({"digits": "done", **{f"digits-{n}": "done" for n in range(2, 11)}}, "", "digits-11", False),
        ({"digits-of-mine": "unfinished"}, "", "digits", False),
    ],
)
def test_make_train_resumes_the_newest_run_that_is_not_done(
    tmp_path: Path, found: dict[str, str | None], arguments: str, chosen: str, resumes: bool
) -> None:
    """Here `accelerate` only prints its arguments."""
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
    environment = {"PATH": os.environ["PATH"]}  # without the variables of the `make` that runs the tests
    command = ["make", "train", f"ARGS={arguments}"]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=True)
    *before, called = done.stdout.splitlines()
    assert called.split("--run_name=")[1].split() == [chosen, *arguments.partition("--run_name=")[0].split()]
    says = f"runs/{chosen} is not done: resuming it; to start another run, add --run_name=NAME to ARGS"
    assert before == [says] * resumes
