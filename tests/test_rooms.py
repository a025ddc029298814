"""docs/make-it-yours.md: what a copy does not need goes, in any order, and the rest still works."""

import random
import re
import shutil
import subprocess
from pathlib import Path

import pytest
from new_tree import tree
from rooms import FILES, MARK, files, throw_out

from tests.faults.runs import assert_same_run
from tests.launching import BIN, PROJECT, Launch, Started

PAGE = (PROJECT / "docs/make-it-yours.md").read_text()
ROOMS = list(FILES)
LINES = 45
"""That a room may have elsewhere; twice as many for text, a quarter of all code in one room."""
MOST_MARKS = 70
"""In train.py and src."""
COLLECT = """\
import sys

import pytest

warned = "ignore::pytest.PytestAssertRewriteWarning"  # of what the warm ranks have imported
sys.exit(pytest.main(["--collect-only", "-q", "-p", "no:cacheprovider", "-W", warned]))
"""


def git(folder: Path, *words: str) -> str:
    identity = ("-c", "user.name=test", "-c", "user.email=test@localhost")
    return subprocess.run(["git", *identity, *words], cwd=folder, check=True, capture_output=True, text=True).stdout


def copy_to(folder: Path) -> Path:
    """Return a copy of the project's files."""
    for name in git(PROJECT, "ls-files").splitlines():
        if (file := PROJECT / name).exists():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(file, folder / name)
    return folder


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def require_that_it_works(launch: Launch, folder: Path, *arguments: str) -> None:
    """Train, import the tests that are left, and look for imports that nobody needs any more."""
    run = launch("ddp", "--max_steps=2", "--log_every=1", *arguments, project=folder, processes=2).succeeded()
    assert len(run.losses) == 2
    (folder / "collect.py").write_text(COLLECT)
    collected = launch("cpu", project=folder, script="collect.py")
    (folder / "collect.py").unlink()
    assert collected.exit_code == 0, collected.stdout[-3000:]
    for check in (["check"], ["format", "--check"]):
        command = [str(BIN / "ruff"), *check, "--no-cache", "train.py", "src", "tests"]
        linted = subprocess.run(command, cwd=folder, capture_output=True, text=True)
        assert linted.returncode == 0, linted.stdout


def test_the_readme_shows_the_smallest_copy() -> None:
    """With its files, and about as many lines as they have: `python scripts/new_tree.py` counts them anew."""
    shown = re.findall(r"^(\S+\.py) +(\d+)  ", (PROJECT / "README.md").read_text(), re.MULTILINE)
    found = {path: lines for path, lines, _ in tree()}
    assert [path for path, _ in shown] == list(found)
    for path, lines in shown:
        assert int(lines) == pytest.approx(found[path], rel=0.2, abs=10), path


def test_a_room_is_its_files_and_few_lines_elsewhere() -> None:
    """And the page names each."""
    assert sorted(re.findall(r"^\| `(\w+)` \|", PAGE, re.MULTILINE)) == sorted(ROOMS)
    marked = [name for path in files(PROJECT) for line in MARK.finditer(path.read_text()) for name in line[2].split()]
    assert {part for name in marked for part in name.split("+")} <= {*ROOMS}
    for room in ROOMS:
        assert all(any(PROJECT.glob(pattern)) for pattern in FILES[room].split()), room
        most = 2 * LINES if room == "text" else LINES
        assert marked.count(room) <= most, room


def test_the_core_has_no_marks() -> None:
    """What a room needs of it goes through the list of parts, or through the task. Tried with one in base.py."""
    marks = {
        path.relative_to(PROJECT): len(MARK.findall(path.read_text()))
        for path in files(PROJECT)
        if path.name == "train.py" or path.is_relative_to(PROJECT / "src")
    }
    assert sum(marks.values()) <= MOST_MARKS
    core = ("train.py", "src/tasks/base.py", "src/config/config.py", "src/checkpoint/resume.py", "src/training/")
    assert {str(path): number for path, number in marks.items() if str(path).startswith(core) and number} == {}


def test_nothing_names_what_goes_with_a_room(tmp_path: Path) -> None:
    """Each alone. Tried without the mark behind an import: it is not used any more, or names what is gone."""
    whole = copy_to(tmp_path / "whole")
    for room in ROOMS:
        copy = shutil.copytree(whole, tmp_path / room)
        throw_out({room}, copy)
        command = [str(BIN / "ruff"), "check", "--no-cache", "train.py", "src", "tests"]
        linted = subprocess.run(command, cwd=copy, capture_output=True, text=True)
        assert linted.returncode == 0, (room, linted.stdout)
        shutil.rmtree(copy)


@pytest.mark.slow
@pytest.mark.parametrize("room", ROOMS)
def test_each_room_can_go_alone(launch: Launch, tmp_path: Path, room: str) -> None:
    throw_out({room}, copy_to(tmp_path))
    require_that_it_works(launch, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
def test_random_sets_of_rooms_can_go(launch: Launch, tmp_path: Path, seed: int) -> None:
    throw_out({*random.Random(seed).sample(ROOMS, len(ROOMS) // 2)}, copy_to(tmp_path))
    require_that_it_works(launch, tmp_path)


def test_all_rooms_can_go_at_once_or_one_by_one_in_any_order(launch: Launch, tmp_path: Path) -> None:
    at_once, one_by_one = (copy_to(tmp_path / name) for name in ("at once", "one by one"))
    throw_out({*ROOMS}, at_once)
    for room in random.Random(0).sample(ROOMS, len(ROOMS)):
        throw_out({room}, one_by_one)
    assert contents(one_by_one) == contents(at_once)
    assert "# room:" not in "".join(path.read_text() for path in files(at_once))
    require_that_it_works(launch, at_once)


@pytest.mark.slow
@pytest.mark.parametrize("yaml", ["cpu", "ddp", "fsdp"])
def test_the_smallest_copy_learns_the_digits_and_resumes_exactly(launch: Launch, tmp_path: Path, yaml: str) -> None:
    """Without any room."""
    project, folder = copy_to(tmp_path / "project"), tmp_path / "run"
    throw_out({*ROOMS}, project)
    arguments = (yaml, "--config=configs/digits.yaml", "--save_every=100")
    whole = launch(*arguments, project=project).succeeded()
    assert whole.summary["eval/accuracy"] >= 0.99
    with Started(*arguments, folder=folder, project=project) as started:
        started.wait_for("step    161/").kill_all()
    resumed = launch(*arguments, folder=folder, project=project).succeeded()
    assert "after step 100, from" in resumed.stdout
    assert_same_run(resumed, whole)
