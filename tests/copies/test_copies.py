"""make new: each copy is about its task, names nothing that is not there, lints, trains and tests itself."""

import os
import re
import shlex
import subprocess
import tomllib
from importlib import import_module
from pathlib import Path
from pkgutil import resolve_name

import pytest
from new import MAP, PARTS, TASKS

from src.config.config import Config
from src.config.settings import setting_fields
from tests.launching import BIN, PROJECT, Launch, Run, run_command, slow
from tests.pages.links import leads_somewhere, links_of
from tests.task_tests import TaskTests

PATH = re.compile(
    r"(?<![\w/.-])(?:accelerate_configs|configs|docs|examples|launchers|plan|src|sweeps|tests)/[\w/.-]*\w"
)
"""A file of the project, in text."""
OURS = re.compile(
    "accelerate-template|this template|make (new|chat|classify|testall|bench|test-gpu|mutate)|scripts/|# room"
    "|[Tt]utorial(?!s/)|CITATION|CONTRIBUTING|SECURITY|pull request|badge|(?<![/.])benchmarks?[/.]|gpu_proof|docs/learn"
)
"""What is about this project."""
OPTIONAL = {"wandb": "wandb.", "check": "check", "machines": "checkpoint.mirror", "tracking": "trackers"}
"""Parts with settings, and how the settings' names begin."""
COPIES = [
    ("blank", "all"), ("mnist", "none"), ("causal_lm", "all"),
    *(slow((task, "all")) for task in TASKS if task not in ("blank", "causal_lm")),
    *(slow((task, "none")) for task in TASKS if task != "mnist"),
    *(slow((part.get("within", "mnist"), name)) for name, part in PARTS.items() if "about" in part),
]  # fmt: skip


def make_new(folder: Path, *words: str) -> Run:
    """Call it without a terminal, as one whose git knows no name."""
    (folder / "gitconfig").write_text("[user]\nuseConfigOnly = true\n")
    git = {"GIT_CONFIG_GLOBAL": str(folder / "gitconfig"), "GIT_CONFIG_SYSTEM": os.devnull}
    return run_command(["make", "--silent", "new", f"PYTHON={BIN / 'python'}", *words], folder, PROJECT, **git)


def copy_of(folder: Path, task: str, without: str) -> Path:
    project = folder / "project"
    make_new(folder, "NAME=my-project", f"DEST={project}", f"TASK={task}", f"WITHOUT={without}").succeeded()
    return project


def make(project: Path, *words: str) -> str:
    """Call make in a copy, with what is installed for this project. Return its output."""
    if not (project / ".venv").exists():
        (project / ".venv").symlink_to(BIN.parent)
    return run_command(["make", "--assume-old=.venv/installed", *words], project, project).succeeded().stdout


def git(folder: Path, *words: str) -> str:
    return subprocess.run(["git", *words], cwd=folder, check=True, capture_output=True, text=True).stdout


def short_run_of(task: str) -> type[TaskTests]:
    module = import_module(f"tests.tasks.test_{task}")
    (found,) = (kind for kind in vars(module).values() if isinstance(kind, type) and kind is not TaskTests
                and issubclass(kind, TaskTests))  # fmt: skip
    return found


@pytest.fixture(scope="module", params=COPIES, ids=lambda words: "-".join(words))
def copied(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str, str]:
    """A copy, its task, and what it does without."""
    task, without = request.param
    return copy_of(tmp_path_factory.mktemp("copy"), task, without), task, without


def test_a_copy_lints_and_trains(launch: Launch, copied: tuple[Path, str, str], tmp_path: Path) -> None:
    project, task, _ = copied
    for check in (["check"], ["format", "--check"]):
        run_command([str(BIN / "ruff"), *check, "--no-cache", "."], project, project).succeeded()
    run = launch("ddp", *short_run_of(task).words(tmp_path), "--max_steps=1", project=project, processes=2)
    assert len(run.succeeded().losses) == 1


def test_a_copy_names_only_what_is_there(copied: tuple[Path, str, str]) -> None:
    """Files, in pages, comments and messages; and nothing that is about this project alone."""
    project, task, _ = copied
    tracked = git(project, "ls-files").splitlines()
    for name in tracked:
        text = (project / name).read_text()
        assert not [line for line in text.splitlines() if OURS.search(line)], name
        assert not [path for path in PATH.findall(text) if not is_there(project, path)], name
        if name.endswith(".md"):
            assert not [target for target in links_of(text) if not leads_somewhere(project / name, target)], name
    assert {name for name in tracked if name.startswith("tests/tasks/test_")} == {f"tests/tasks/test_{task}.py"}
    tomllib.loads((project / "pyproject.toml").read_text())


def is_there(project: Path, path: str) -> bool:
    """Return whether a file is there, or would be here either: an example of a name."""
    return (project / path).exists() or not (PROJECT / path).exists()


def test_a_copys_pages_name_only_its_settings(copied: tuple[Path, str, str]) -> None:
    project, *_ = copied
    tasks = re.findall(r'^    "(\w+)": "', (project / "src/tasks/__init__.py").read_text(), re.M)
    known = {name for task in tasks for name, *_ in setting_fields(Config[resolve_name(MAP[task])])}  # type: ignore[arg-type, misc]
    gone = tuple(start for part, start in OPTIONAL.items() if not all(map(project.glob, PARTS[part]["files"].split())))
    for page in [*project.glob("docs/*.md"), project / "README.md"]:
        text = page.read_text()
        named = {name.rstrip(".") for name in re.findall(r"(?<![\w.])task\.[a-z_.]+", text)}
        assert not [name for name in named if not any(f"{k}.".startswith(f"{name}.") for k in known)], page
        assert not [start for start in gone if re.search(rf"--{re.escape(start)}", text)], page


def test_each_yaml_of_a_copy_is_in_a_table(copied: tuple[Path, str, str]) -> None:
    project, *_ = copied
    pages = "".join(page.read_text() for page in project.glob("docs/*.md"))
    yamls = {file.name for file in project.glob("accelerate_configs/*.yaml")}
    assert yamls == {*re.findall(r"^\|.*?\[(\w+\.yaml)\]\([./]*accelerate_configs/", pages, re.M)}


@pytest.mark.slow
@pytest.mark.parametrize("task", TASKS)
def test_a_copys_own_tests_and_type_checks_pass(task: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.launching.SECONDS", 3600)
    project = copy_of(tmp_path, task, "none")
    assert " passed" in make(project, "test", "ARGS=-p no:cacheprovider")
    make(project, "lint")


@pytest.mark.slow
@pytest.mark.parametrize("task", TASKS)
def test_a_copys_make_train_trains_its_task(task: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a folder whose name means something else to make and to a shell; its data are made first."""
    monkeypatch.setattr("tests.launching.SECONDS", 3600)
    project = tmp_path / 'a "deep" one, it\'s $DEST $(HOME) `pwd` #1 & more/my-project'
    done = make_new(tmp_path, "NAME=my-project", f"DEST={project}", f"TASK={task}", "WITHOUT=all").succeeded()
    assert f"cd {shlex.quote(str(project))}\n" in done.stdout
    assert "done in " in make(project, "train", "ARGS=--max_steps=4")


def test_a_copy_is_a_repository_of_its_own(tmp_path: Path) -> None:
    """With one commit, by an author who has no name here; nothing else is made beside its folder."""
    project = copy_of(tmp_path, "blank", "all")
    assert git(project, "log", "--format=%an: %s") == "my-project: Start my-project\n"
    assert git(project, "status", "--short") == ""
    assert sorted(file.name for file in tmp_path.iterdir()) == ["gitconfig", "project"]
    title, what = (project / "README.md").read_text().split("\n\n")[:2]
    assert (title, what[:26]) == ("# my-project", "Learns the sum of eight nu")


def test_a_blank_task_is_the_readmes() -> None:
    """But for types and docstrings."""
    blank = re.sub(
        r'(?m)^ *""".*"""\n|: nn\.Module|: Any| -> [\w\[\], .]+(?=:)', "", (PROJECT / "examples/blank.py").read_text()
    )
    (code,) = re.findall(r"```python\n(import torch\n.*?)```", (PROJECT / "README.md").read_text(), re.S)
    lines = [line.partition("  #")[0].strip().replace("torch.nn.", "nn.") for line in code.splitlines()]
    mine = blank.replace("torch.nn.", "nn.").replace("Blank", "Mine").replace("blank", "mine")
    assert [line for line in lines if line and line not in mine and "import" not in line] == []
