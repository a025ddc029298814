"""make new: it asks as a person would, says all that is wrong at once, and leaves nothing behind where it fails."""

import fcntl
import os
import pty
import re
import select
import subprocess
import termios
from pathlib import Path
from typing import Any

import pytest
from new import PARTS, TASKS, page

from tests.copies.test_copies import git, make_new
from tests.launching import BIN, PROJECT, clean_environment, hear_signals, run_command
from tests.mutate import copy_project

CTRL_C, CTRL_D = "\x03", "\x04"
NAMES = "needs 1 to 30 letters, digits, - and _, with a letter or digit at both ends"


def asked(*keys: str, words: tuple[str, ...] = ()) -> tuple[int, str]:
    """Call it in a terminal, and type this whenever it has asked. Return its exit code and what the terminal shows."""
    ours, theirs = pty.openpty()
    command = ["make", "--silent", "new", f"PYTHON={BIN / 'python'}", *words]
    streams: dict[str, Any] = {"stdin": theirs, "stdout": theirs, "stderr": theirs}
    how: dict[str, Any] = {"start_new_session": True, "preexec_fn": own_the_terminal}
    process = subprocess.Popen(command, cwd=PROJECT, env=clean_environment(), **streams, **how)
    os.close(theirs)
    typed, shown = list(keys), ""
    while part := read(ours, in_vain=keys[-1:] if not typed else ()):
        shown += part
        if shown.endswith("]: ") and typed:
            os.write(ours, typed.pop(0).encode())
    os.close(ours)
    assert not typed, shown
    return process.wait(60), shown.replace("\r\n", "\n")


def own_the_terminal() -> None:
    """Make its Ctrl-C a signal to this process."""
    hear_signals()
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)


def read(terminal: int, in_vain: tuple[str, ...]) -> str:
    """Return what is shown next. Press Ctrl-C again while nothing is: between a question and Python's waiting for the
    answer, for a moment, it does not hear it."""
    while in_vain == (CTRL_C,) and not select.select([terminal], [], [], 1)[0]:
        os.write(terminal, CTRL_C.encode())
    try:
        return os.read(terminal, 4096).decode()
    except OSError:  # closed by the other side
        return ""


def test_it_asks_for_what_is_missing_and_says_why_an_answer_is_wrong(tmp_path: Path) -> None:
    """Tasks and parts may be chosen by number. Enter takes the default."""
    dest, report = tmp_path / "mine", str([*PARTS].index("report") + 1)
    keys = ("it's\n", "\n", "99\n", "1\n", "reprot\n", f"{report} text\n")
    code, shown = asked(*keys, words=(f"DEST={dest}",))
    assert code == 0, shown
    for line in (
        f"Name [my-project]: it's\n  it's: {NAMES}\n",
        "  99: not known (mnist, ",
        "  reprot: not known, did you mean report? (aliases, check, ",
        f"my-project is in {dest}, ",
        "  left out  chats, image_models, long_sequences, report, samples, streaming, text\n",
        *(page(task)[0].splitlines()[0] for task in TASKS),
        *(part["about"] for part in PARTS.values() if "about" in part),
    ):
        assert line in shown
    assert "Folder" not in shown
    assert not (dest / "src/tracking/report.py").exists()


def test_given_arguments_are_not_asked_for_and_a_wrong_one_ends_it(tmp_path: Path) -> None:
    words = ("NAME=mine", "TASK=dpo", "WITHOUT=check")
    code, shown = asked(f"{tmp_path}/$(here) 'it'\n", words=words)
    assert code == 0, shown
    assert shown.count("]: ") == 1
    assert (tmp_path / "$(here) 'it'/src/tasks/dpo.py").exists()
    code, shown = asked(words=("NAME=mine", "WITHOUT=chek"))
    assert shown.splitlines()[0].startswith("make new: WITHOUT=chek: not known, did you mean check? (aliases, check, ")
    assert code == 2


@pytest.mark.parametrize("key", [CTRL_C, CTRL_D], ids=["Ctrl-C", "Ctrl-D"])
def test_who_leaves_leaves_nothing_behind(tmp_path: Path, key: str) -> None:
    _, shown = asked("mine\n", f"{tmp_path}/mine\n", key)
    assert shown.splitlines()[-1] == "make new: you left; nothing was made"
    assert [*tmp_path.iterdir()] == []


def test_all_mistakes_are_told_at_once_and_nothing_is_overwritten(tmp_path: Path) -> None:
    """Where nobody can be asked."""
    mine, inside = tmp_path / "mine", PROJECT / "runs/my-project"
    mine.mkdir()
    (mine / "file").touch()
    for words, lines in (
        (("NAME=it's", f"DEST={mine}", "TASK=dop", "WITHOUT=tols wandb"), [
            f"NAME=it's: {NAMES}",
            f"DEST={mine}: is there already; name a folder that doesn't exist or is empty, such as ../my-project",
            "TASK=dop: not known, did you mean dpo?",
            "WITHOUT=tols: not known, did you mean tools?",
        ]),
        (("NAME=x", f"DEST={inside}", "TASK=dpo", "WITHOUT=text"), [
            f"DEST={inside}: is inside this project; name a folder outside of it, such as ../my-project",
            "WITHOUT=text: the task dpo needs it",
        ]),
        ((f"DEST={tmp_path}/new",), [f"NAME=: {NAMES}"]),
    ):  # fmt: skip
        done = make_new(tmp_path, *words)
        assert done.exit_code == 2
        told = [re.sub(r" \([^)]*\)$", "", line) for line in done.stderr.splitlines()[:-1]]
        assert told == [f"make new: {line}" for line in lines]
    assert not inside.exists()
    assert [file.name for file in mine.iterdir()] == ["file"]


def test_a_task_that_is_not_committed_comes_along_or_is_missed(tmp_path: Path) -> None:
    """With its tests: those of the blank one, until it has its own. A data file that git ignores does not."""
    here, there = copy_project(tmp_path / "here"), tmp_path / "there"
    for words in (("init", "-q"), ("add", "--all")):
        git(here, *words)
    tasks = here / "src/tasks/__init__.py"
    tasks.write_text(tasks.read_text().replace("TASKS = {\n", 'TASKS = {\n    "mine": "src.tasks.mine:Mine",\n'))
    command = ["make", "--silent", "new", f"PYTHON={BIN / 'python'}", "NAME=own", f"DEST={there}", "TASK=mine"]
    done = run_command(command, tmp_path, here)
    says = "make new: TASK=mine: src/tasks/__init__.py names src/tasks/mine.py, which is not there"
    assert (done.exit_code, done.stderr.splitlines()[0]) == (2, says)
    blank = (PROJECT / "examples/blank.py").read_text()
    (here / "src/tasks/mine.py").write_text(blank.replace("Blank", "Mine").replace('"blank"', '"mine"'))
    (elsewhere := tmp_path / "notes.md").write_text("accelerate-template")
    (here / "src/tasks/notes.md").symlink_to(elsewhere)
    run_command(command, tmp_path, here).succeeded()
    assert elsewhere.read_text() == "accelerate-template", "a link is not written through"
    assert (there / "src/tasks/notes.md").is_symlink()
    assert (there / "src/tasks/mine.py").exists()
    assert "  name: mine\n" in (there / "configs/mine.yaml").read_text()
    assert "--task.name=mine" in (there / "tests/tasks/test_mine.py").read_text()
    assert re.findall(r'^    "(\w+)"', (there / "src/tasks/__init__.py").read_text(), re.M)[0] == "mine"
