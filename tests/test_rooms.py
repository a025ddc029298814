"""docs/make-it-yours.md: what a copy does not need goes by the commands there, and the rest still works."""

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.launching import BIN, PROJECT, Launch

PAGE = (PROJECT / "docs/make-it-yours.md").read_text()
ROOMS: dict[str, str] = dict(re.findall(r"^## Without .+?^```sh (\S+)\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE))
"""The commands that throw out a part, by its name."""
LINES = 5
"""That a room may change elsewhere."""
COLLECT = """\
import sys

import pytest

warned = "ignore::pytest.PytestAssertRewriteWarning"  # of what the warm ranks have imported
sys.exit(pytest.main(["--collect-only", "-q", "-p", "no:cacheprovider", "-W", warned]))
"""


def git(folder: Path, *words: str) -> str:
    identity = ("-c", "user.name=test", "-c", "user.email=test@localhost")
    return subprocess.run(["git", *identity, *words], cwd=folder, check=True, capture_output=True, text=True).stdout


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """The project's files, in a repository of their own."""
    folder = tmp_path / "copy"
    for name in git(PROJECT, "ls-files").splitlines():
        if (file := PROJECT / name).exists():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(file, folder / name)
    git(folder, "init", "--quiet")
    git(folder, "add", "--all", "--force")
    git(folder, "commit", "--quiet", "--message=all of it")
    return folder


def throw_out(commands: str, folder: Path) -> None:
    subprocess.run(["bash", "-e", "-c", commands], cwd=folder, check=True)


def without(rooms: list[str], copy: Path) -> str:
    """Throw rooms out of a copy of `copy`, one after the other, and return the hash of what is left."""
    folder = copy.with_name("part")
    shutil.copytree(copy, folder, copy_function=os.link)  # git and sed write new files, and leave these as they are
    throw_out("".join(ROOMS[room] for room in rooms), folder)
    git(folder, "add", "--all")
    left = git(folder, "write-tree")
    shutil.rmtree(folder)
    return left


def changed_lines(folder: Path) -> int:
    """Return how many lines of files that are still there have been deleted or replaced."""
    changes = git(folder, "diff", "HEAD", "--numstat", "--diff-filter=M").splitlines()
    return sum(max(map(int, change.split()[:2])) for change in changes)


def require_that_it_works(launch: Launch, folder: Path, *arguments: str) -> None:
    """Train, import the tests that are left, and look for imports that nobody needs any more."""
    run = launch("ddp", "--max_steps=2", "--log_every=1", *arguments, project=folder, processes=2).succeeded()
    assert len(run.losses) == 2
    (folder / "collect.py").write_text(COLLECT)
    collected = launch("cpu", project=folder, script="collect.py")
    (folder / "collect.py").unlink()
    assert collected.exit_code == 0, collected.stdout[-3000:]
    linted = subprocess.run(
        [BIN / "ruff", "check", "--no-cache", "train.py", "src", "tests"], cwd=folder, capture_output=True, text=True
    )
    assert linted.returncode == 0, linted.stdout


@pytest.mark.slow
@pytest.mark.parametrize("room", ROOMS)
def test_each_room_can_go_alone(launch: Launch, copy: Path, room: str) -> None:
    throw_out(ROOMS[room], copy)
    assert changed_lines(copy) <= LINES
    require_that_it_works(launch, copy)


def test_all_rooms_can_go_in_any_order(copy: Path) -> None:
    """In the page's and in the opposite one: each pair both ways. Tried without -f: git won't remove src/check, into
    which the commands for the report have written."""
    assert without([*ROOMS], copy) == without([*ROOMS][::-1], copy)


@pytest.mark.slow
@pytest.mark.parametrize("room", ROOMS)
def test_each_pair_of_rooms_can_go_in_either_order(copy: Path, room: str) -> None:
    for other in [*ROOMS][: [*ROOMS].index(room)]:
        assert without([room, other], copy) == without([other, room], copy), other


def test_all_rooms_can_go_together(launch: Launch, copy: Path) -> None:
    assert len(ROOMS) == PAGE.count("\n## Without ")
    for commands in ROOMS.values():
        throw_out(commands, copy)
    require_that_it_works(launch, copy)
