"""make new: it asks as a person would, and what it makes is about its task, trains it and tests it."""

import fcntl
import os
import pty
import re
import select
import shlex
import subprocess
import termios
from pathlib import Path
from typing import Any

import pytest
from new_pages import leads_somewhere
from new_project import ALWAYS, PAGES
from new_questions import TASKS, about
from rooms import ABOUT, FILES, pages

from tests.launching import BIN, PROJECT, Launch, Run, clean_environment, hear_signals, run_command, slow

CTRL_C, CTRL_D = "\x03", "\x04"
ALL = " ".join(FILES)
PROJECTS = [
    slow(("mnist", ALL, "configs/digits.yaml")),
    ("image_classification", "check wandb text", "configs/image_classification.yaml"),
    slow(("dpo", "", "configs/dpo.yaml")),
]
OURS = "|".join((
    "accelerate-template", "[Tt]his template", "[Uu]se this template", "make (new|chat|classify|testall|bench)",
    "scripts/", "# room", "<!-- room", "thrown out", r"\bpromises?\b", "[Bb]enchmarks?/",
    r"[Tt]utorial\b", "CITATION", "CONTRIBUTING", "pull request", "(?<!pytorch/)examples/", "gpu_proof", "badge",
))  # fmt: skip
"""What is about this project."""
ALLOWED = (
    r"[Cc]hat.template|src/tasks/text|generate\.py|[Jj]inja|Template[EP]|grid-template|kubernetes\.yaml|templates?\b"
)
"""What a template may be: of chats, of a page, of a layout, of a pod."""


def make_new(folder: Path, *words: str) -> Run:
    """Call it as one whose git knows no name, and without a terminal."""
    command = ["make", "--silent", "new", f"PYTHON={BIN / 'python'}", *words]
    return run_command(command, folder, PROJECT, **nobody(folder))


def nobody(folder: Path) -> dict[str, str]:
    (folder / "gitconfig").write_text("[user]\nuseConfigOnly = true\n")
    return {"GIT_CONFIG_GLOBAL": str(folder / "gitconfig"), "GIT_CONFIG_SYSTEM": os.devnull}


def asked(folder: Path, *keys: str, words: tuple[str, ...] = ()) -> tuple[int, str]:
    """Call it in a terminal, and type this whenever it has asked. Return its exit code and what the terminal shows."""
    ours, theirs = pty.openpty()
    command = ["make", "--silent", "new", f"PYTHON={BIN / 'python'}", *words]
    streams: dict[str, Any] = {"stdin": theirs, "stdout": theirs, "stderr": theirs}
    how: dict[str, Any] = {"start_new_session": True, "preexec_fn": own_the_terminal}
    process = subprocess.Popen(command, cwd=PROJECT, env=clean_environment(**nobody(folder)), **streams, **how)
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
    """So that its Ctrl-C is a signal to this process."""
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


def make(project: Path, *words: str) -> str:
    """Call make in a new project, with what is installed for this one. Return its output."""
    if not (project / ".venv").exists():
        (project / ".venv").symlink_to(BIN.parent)
    return run_command(["make", "--assume-old=.venv/installed", *words], project, project).succeeded().stdout


def git(folder: Path, *words: str) -> str:
    return subprocess.run(["git", *words], cwd=folder, check=True, capture_output=True, text=True).stdout


def test_it_asks_for_what_is_missing_and_says_why_an_answer_is_wrong(tmp_path: Path) -> None:
    """Enter takes the default: here the task, and to leave out text, which it can do without."""
    dest = tmp_path / "mine"
    code, shown = asked(
        tmp_path, "it's\n", "\n", "99\n", "\n", "reprot\n", "report text\n", words=(f"DEST={dest}",)
    )  # fmt: skip
    assert code == 0, shown
    for line in (
        "Name [my-project]: it's",
        "  it's: needs 1 to 30 letters, digits, - and _, with a letter or digit at both ends",
        "  99: not known (mnist, ",
        "  reprot: not known, did you mean report? (check, ",
        f"my-project is in {dest}, ",
        "  left out  report, text",
        *(f"{task:<22}{about(task)}" for task in TASKS),
        *(f"  {room:<11}{line}" for room, line in ABOUT.items()),
    ):
        assert line in shown
    assert "Folder" not in shown
    assert not (dest / "src/tracking/report.py").exists()


def test_given_arguments_are_not_asked_for_and_a_wrong_one_ends_it(tmp_path: Path) -> None:
    words = ("NAME=mine", "TASK=dpo", "WITHOUT=check")
    code, shown = asked(tmp_path, f"{tmp_path}/$(here) 'it'\n", words=words)
    assert code == 0, shown
    assert shown.count("]: ") == 1
    assert (tmp_path / "$(here) 'it'/src/tasks/dpo.py").exists()
    code, shown = asked(tmp_path, words=("NAME=mine", "WITHOUT=chek"))
    assert shown.splitlines()[0].startswith("make new: WITHOUT=chek: not known, did you mean check?")
    assert code == 2


@pytest.mark.parametrize("key", [CTRL_C, CTRL_D], ids=["Ctrl-C", "Ctrl-D"])
def test_who_leaves_leaves_nothing_behind(tmp_path: Path, key: str) -> None:
    """Tried without: a traceback."""
    _, shown = asked(tmp_path, "mine\n", f"{tmp_path}/mine\n", key)
    assert shown.splitlines()[-1] == "make new: you left; nothing was made"
    assert [file.name for file in tmp_path.iterdir()] == ["gitconfig"]


def test_all_mistakes_are_told_at_once_and_nothing_is_overwritten(tmp_path: Path) -> None:
    """Where nobody can be asked. Tried without each of the checks: its message is missing, or there is a traceback."""
    mine, inside = tmp_path / "mine", PROJECT / "runs/my-project"
    mine.mkdir()
    (mine / "file").touch()
    for words, lines in (
        (("NAME=it's", f"DEST={mine}", "TASK=dop", "WITHOUT=tex wandb"), [
            "NAME=it's: needs 1 to 30 letters, digits, - and _, with a letter or digit at both ends",
            f"DEST={mine}: is there already; name a folder that doesn't exist or is empty, such as ../my-project",
            "TASK=dop: not known, did you mean dpo?",
            "WITHOUT=tex: not known, did you mean text?",
        ]),
        (("NAME=x", f"DEST={inside}", "TASK=dpo", "WITHOUT=text"), [
            f"DEST={inside}: is inside this project; name a folder outside of it, such as ../my-project",
            "WITHOUT=text: the task dpo needs it",
        ]),
        ((f"DEST={tmp_path}/new",), [
            "NAME=: needs 1 to 30 letters, digits, - and _, with a letter or digit at both ends",
        ]),
    ):  # fmt: skip
        done = make_new(tmp_path, *words)
        assert done.exit_code == 2
        told = [re.sub(r" \([^)]*\)$", "", line) for line in done.stderr.splitlines()[:-1]]
        assert told == [f"make new: {line}" for line in lines]
    assert not inside.exists()
    assert [file.name for file in mine.iterdir()] == ["file"]


def test_each_room_is_offered_or_never_comes_along() -> None:
    assert sorted([*ABOUT, *ALWAYS]) == sorted(FILES)


@pytest.mark.parametrize(
    ("task", "without"),
    [*((task, "") for task in TASKS), ("mnist", "all"), *(slow(task, "all") for task in [*TASKS][1:])],
)
def test_a_project_is_about_its_task_and_names_nothing_that_is_gone(tmp_path: Path, task: str, without: str) -> None:
    """Its pages link to what is there, and its code is formatted. Tried without `cut_pages` and `cut_comments`."""
    project = tmp_path / "project"
    make_new(tmp_path, "NAME=my-project", f"DEST={project}", f"TASK={task}", f"WITHOUT={without}").succeeded()
    for check in (["check"], ["format", "--check"]):
        run_command([str(BIN / "ruff"), *check, "--no-cache", "."], project, cwd=project).succeeded()
    tracked = git(project, "ls-files").splitlines()
    assert {Path(name).parent.as_posix() for name in tracked if name.startswith("tests/")} == {"tests"}
    assert {name for name in tracked if name.startswith("tests/test_")} == {f"tests/test_{task}.py"}
    assert {page.stem for page in (project / "docs").iterdir()} <= {*PAGES}
    for name in tracked:
        text = (project / name).read_text() if name != "LICENSE" else ""
        for number, line in enumerate(text.splitlines(), start=1):
            where = f"{name}:{number}: {line}"
            assert not re.search(OURS, line), where
            assert re.search(ALLOWED, where) or "template" not in line.lower(), where
            for path in re.findall(r"(?<![/\w])(?:docs|tests|configs|sweeps)/[\w/-]+\.(?:md|py|yaml)\b", line):
                assert (project / path).exists(), where
    for page in pages(project):
        for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
            assert leads_somewhere(page, target), (page, target)
    title, what = (project / "README.md").read_text().split("\n\n")[:2]
    assert (title, what[:1].isupper()) == ("# my-project", True)


@pytest.fixture(scope="module", params=PROJECTS)
def made(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str, str]:
    """A new project, its task and its config, in a folder whose name says something else to make and to a shell."""
    task, without, config = request.param
    folder = tmp_path_factory.mktemp("new")
    project = folder / 'a "deep" one, it\'s $DEST $(HOME) `pwd` #1 & more/my-project'
    words = ("NAME=my-project", f"DEST={project}", f"TASK={task}", f"WITHOUT={without}")
    done = make_new(folder, *words).succeeded()
    assert f"  task      {task}: src/tasks/{task}.py, {config}\n" in done.stdout
    assert f"cd {shlex.quote(str(project))}\n" in done.stdout
    assert sorted(file.name for file in folder.iterdir()) == [project.parent.name, "gitconfig"]
    return project, task, config


def test_make_train_trains_its_task(launch: Launch, made: tuple[Path, str, str]) -> None:
    """Tried without the changes to the Makefile: the digits are trained."""
    project, task, config = made
    assert f"train.py --config {config} " in make(project, "--dry-run", "train")
    if task != "mnist":
        make(project, "data")
    words = (f"--config={config}", f"--task.name={task}", "--max_steps=2", "--log_every=1")
    assert len(launch("ddp", *words, project=project, processes=2).succeeded().losses) == 2


def test_it_is_a_repository_of_its_own(made: tuple[Path, str, str]) -> None:
    project = made[0]
    assert git(project, "log", "--format=%an: %s") == "my-project: Start my-project\n"
    assert set(git(project, "status", "--short").splitlines()) <= {"?? .venv"}  # a link here


@pytest.mark.slow
@pytest.mark.parametrize("task", TASKS)
def test_its_own_tests_and_type_checks_pass(task: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its tests were tried in one with a train.py that forgets to multiply by the processes (gradient norms differ),
    that resumes with the first batch, that counts an example too many, and whose rate is 0: the test of each fails."""
    monkeypatch.setattr("tests.launching.SECONDS", 3600)
    project = tmp_path / "project"
    make_new(tmp_path, "NAME=my-project", f"DEST={project}", f"TASK={task}").succeeded()
    assert " passed" in make(project, "test", "ARGS=-p no:cacheprovider")
    make(project, "lint")


@pytest.mark.slow
@pytest.mark.parametrize("made", PROJECTS[:2], indirect=True)
def test_make_train_passes_in_it(made: tuple[Path, str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.launching.SECONDS", 3600)
    make(made[0], "train", "ARGS=--max_steps=20")
