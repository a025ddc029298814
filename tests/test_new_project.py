"""make new: fresh projects, each trained and tested, and what is refused. See docs/make-it-yours.md."""

import os
import re
import shlex
from pathlib import Path

import pytest

from tests.launching import BIN, PROJECT, Launch, Run, run_command, slow
from tests.test_rooms import ROOMS, git, require_that_it_works

ALL = " ".join(ROOMS)
PROJECTS = [
    slow(("mnist", ALL, "configs/digits.yaml")),
    ("image_classification", "check wandb text", "configs/image_classification.yaml"),
    slow(("dpo", "", "configs/dpo.yaml")),
]


def make_new(folder: Path, *words: str) -> Run:
    """Call it as one whose git knows no name."""
    (folder / "gitconfig").write_text("[user]\nuseConfigOnly = true\n")
    nobody = {"GIT_CONFIG_GLOBAL": str(folder / "gitconfig"), "GIT_CONFIG_SYSTEM": os.devnull}
    command = ["make", "--silent", "new", f"PYTHON={BIN / 'python'}", *words]
    return run_command(command, folder, PROJECT, **nobody)


def make(project: Path, *words: str) -> str:
    """Call make in a new project, with what is installed for this one. Return its output."""
    if not (project / ".venv").exists():
        (project / ".venv").symlink_to(BIN.parent)
    return run_command(["make", "--assume-old=.venv/installed", *words], project, project).succeeded().stdout


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
    """And its tests are found. Tried without the changes to the Makefile: the digits are trained."""
    project, task, config = made
    assert f"train.py --config {config} " in make(project, "--dry-run", "train")
    if task != "mnist":
        make(project, "data")
    require_that_it_works(launch, project, f"--config={config}", f"--task.name={task}")


def test_it_is_a_repository_of_its_own_with_its_name_everywhere(made: tuple[Path, str, str]) -> None:
    """And its pages link to nothing that is gone. Tried without `rename`: the first assertion fails."""
    project = made[0]
    assert run_command(["git", "grep", "-i", "accelerate-template"], project, project).stdout == ""
    assert git(project, "log", "--format=%an: %s") == "my-project: Start my-project\n"
    assert set(git(project, "status", "--short").splitlines()) <= {"?? .venv"}  # a link here
    run_command([str(BIN / "ruff"), "format", "--check", "--no-cache", "."], project, cwd=project).succeeded()
    for page in map(project.joinpath, git(project, "ls-files", "*.md").splitlines()):
        for path in re.findall(r"\]\(([^):#]+)[)#]", page.read_text()):
            assert (page.parent / path).exists(), (page, path)


@pytest.mark.slow
@pytest.mark.parametrize("made", PROJECTS[:2], indirect=True)
def test_make_train_and_make_test_pass_in_it(made: tuple[Path, str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Of its tests, those in no folder: text and check are this project's own, and faults need a quiet machine. In a
    project with all rooms they are almost this one's."""
    monkeypatch.setattr("tests.launching.SECONDS", 3600)
    make(made[0], "train", "ARGS=--max_steps=20")
    make(made[0], "test", "ARGS=-n0 -p no:cacheprovider tests/test_*.py")


def test_all_mistakes_are_told_at_once_and_nothing_is_overwritten(tmp_path: Path) -> None:
    """Tried without each of the checks: its message is missing, or there is a traceback; or a project inside this
    one."""
    mine, inside = tmp_path / "mine", PROJECT / "runs/my-project"
    mine.mkdir()
    (mine / "file").touch()
    for words, lines in (
        (("NAME=it's", f"DEST={mine}", "TASK=dop", "WITHOUT=tex wandb"), [
            "NAME=it's: needs 1 to 30 letters, digits, - and _, with a letter or digit at both ends",
            f"DEST={mine}: is there already; name a folder that doesn't exist or is empty, such as "
            "DEST=../my-project",
            "TASK=dop: not known, did you mean dpo?",
            "WITHOUT=tex: not known, did you mean text?",
        ]),
        (("NAME=x", f"DEST={inside}", "TASK=dpo", "WITHOUT=text"), [
            f"DEST={inside}: is inside this project; name a folder outside of it, such as DEST=../my-project",
            "WITHOUT=text: the task dpo needs it",
        ]),
    ):  # fmt: skip
        done = make_new(tmp_path, *words)
        assert done.exit_code == 2
        told = [re.sub(r" \([^)]*\)$", "", line) for line in done.stderr.splitlines()[:-1]]
        assert told == [f"make new: {line}" for line in lines]
    assert not inside.exists()
    assert [file.name for file in mine.iterdir()] == ["file"]
