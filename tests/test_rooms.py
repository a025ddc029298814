"""docs/make-it-yours.md: what a copy does not need goes, in any order; make new: fresh projects, trained and tested."""

import os
import random
import re
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest
from new_tree import tree
from rooms import FILES, MARK, files, throw_out

from tests.faults.runs import assert_same_run
from tests.launching import BIN, PROJECT, Launch, Run, Started, run_command, slow

PAGE = (PROJECT / "docs/make-it-yours.md").read_text()
ROOMS = list(FILES)
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


def test_the_page_names_each_room_and_each_mark_and_file_is_of_one() -> None:
    assert sorted(re.findall(r"^\| `(\w+)` \|", PAGE, re.MULTILINE)) == sorted(ROOMS)
    marked = [name for path in files(PROJECT) for line in MARK.finditer(path.read_text()) for name in line[2].split()]
    assert {part for name in marked for part in name.split("+")} <= {*ROOMS}
    for room in ROOMS:
        assert all(any(PROJECT.glob(pattern)) for pattern in FILES[room].split()), room


def test_the_core_has_no_marks() -> None:
    """What a room needs of it goes through the list of parts, or through the task. Tried with one in base.py."""
    core = ("train.py", "src/tasks/base.py", "src/config/config.py", "src/checkpoint/resume.py", "src/training/")
    paths = [path for path in files(PROJECT) if str(path.relative_to(PROJECT)).startswith(core)]
    assert [path for path in paths if MARK.search(path.read_text())] == []


def test_no_room_takes_along_what_is_done_without_it() -> None:
    """A block that a mark is on goes with its room: `if not self.streaming:` took the download of other data along."""
    assert [path for path in (PROJECT / "src").rglob("*.py") if re.search(r"if not .*# room:", path.read_text())] == []


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
    """Of its tests, those in no folder: text and check are this project's own, and faults need a quiet machine."""
    monkeypatch.setattr("tests.launching.SECONDS", 3600)
    make(made[0], "train", "ARGS=--max_steps=20")
    make(made[0], "test", "ARGS=-n0 -p no:cacheprovider tests/test_*.py")


def test_all_mistakes_are_told_at_once_and_nothing_is_overwritten(tmp_path: Path) -> None:
    """Tried without each of the checks: its message is missing, or there is a traceback."""
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
