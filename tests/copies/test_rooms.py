"""docs/make-it-yours.md: what a copy does not need goes, in any order."""

import json
import random
import re
import shutil
import subprocess
from pathlib import Path

import pytest
from new_tree import tree
from rooms import FILES, MARK, SECTION_MARK, files, pages, remove_marks, throw_out

from tests.faults.runs import assert_same_run
from tests.launching import BIN, PROJECT, Launch, Started

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


def code(folder: Path) -> list[str]:
    return [name for name in ("train.py", "src", "plan", "tests") if (folder / name).exists()]


def require_that_it_works(launch: Launch, folder: Path, *arguments: str) -> None:
    """Train, import the tests that are left, and look for imports that nobody needs any more."""
    run = launch("ddp", "--max_steps=2", "--log_every=1", *arguments, project=folder, processes=2).succeeded()
    assert len(run.losses) == 2
    (folder / "collect.py").write_text(COLLECT)
    collected = launch("cpu", project=folder, script="collect.py")
    (folder / "collect.py").unlink()
    none = pytest.ExitCode.NO_TESTS_COLLECTED  # they are of the room `template`
    assert collected.exit_code == (0 if [*folder.glob("tests/test_*.py")] else none), collected.stdout[-3000:]
    for check in (["check"], ["format", "--check"]):
        command = [str(BIN / "ruff"), *check, "--no-cache", *code(folder)]
        linted = subprocess.run(command, cwd=folder, capture_output=True, text=True)
        assert linted.returncode == 0, linted.stdout


def test_the_page_shows_the_smallest_copy() -> None:
    """With its files, and about as many lines as they have: `python scripts/new_tree.py` counts them anew."""
    shown = re.findall(r"^(\S+\.py) +(\d+)  ", PAGE, re.MULTILINE)
    found = {path: lines for path, lines, _ in tree()}
    assert [path for path, _ in shown] == list(found)
    for path, lines in shown:
        assert int(lines) == pytest.approx(found[path], rel=0.2, abs=10), path


def test_the_page_names_each_room_and_each_mark_and_file_is_of_one() -> None:
    table = PAGE.partition("## The rooms")[2]
    assert sorted(re.findall(r"^\| `(\w+)` \|", table, re.MULTILINE)) == sorted(ROOMS)
    marked = [name for path in files(PROJECT) for line in MARK.finditer(path.read_text()) for name in line[2].split()]
    marked += [
        name for page in pages(PROJECT) for names in SECTION_MARK.findall(page.read_text()) for name in names.split()
    ]
    assert {part for name in marked for part in name.split("+")} <= {*ROOMS}
    for room in ROOMS:
        assert all(any(PROJECT.glob(pattern)) for pattern in FILES[room].split()), room


def test_the_core_has_no_marks() -> None:
    """What a room needs of it goes through the list of parts, or through the task. Tried with one in base.py."""
    core = ("train.py", "src/tasks/base.py", "src/config/run.py", "src/checkpoint/resume.py", "src/training/")
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
        command = [str(BIN / "ruff"), "check", "--no-cache", *code(copy)]
        linted = subprocess.run(command, cwd=copy, capture_output=True, text=True)
        assert linted.returncode == 0, (room, linted.stdout)
        shutil.rmtree(copy)


def test_a_section_goes_with_its_room(tmp_path: Path) -> None:
    """Up to the next heading of its level or a higher one; # in code is no heading. Tried with the first heading."""
    page, whole = (
        tmp_path / "docs/page.md",
        """# Page

## Both
<!-- room: wandb trackers -->

Either.

## One
<!-- room: check -->

    ```sh
    # not a heading
    ```

### Below it

Of it.

# Next

### Last
<!-- room: text+check -->
The end.
""".replace("    ", ""),
    )
    page.parent.mkdir()
    page.write_text(whole)
    throw_out({"plan"}, tmp_path)
    assert page.read_text() == whole
    throw_out({"check", "wandb"}, tmp_path)
    assert page.read_text() == "# Page\n\n## Both\n<!-- room: trackers -->\n\nEither.\n\n# Next\n"
    remove_marks(tmp_path)
    assert page.read_text() == "# Page\n\n## Both\n\nEither.\n\n# Next\n"


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
    assert "<!-- room:" not in "".join(path.read_text() for path in pages(at_once))
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


def test_the_smallest_copy_with_text_trains_a_language_model(launch: Launch, tmp_path: Path) -> None:
    """Without streaming, --check, machines and the rest."""
    project = copy_to(tmp_path / "project")
    throw_out({*ROOMS} - {"text"}, project)
    data = tmp_path / "rows.jsonl"
    data.write_text("".join(json.dumps({"text": f"one, two, {number}"}) + "\n" for number in range(40)))
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    model = [f"--task.architecture.{name}={value}" for name, value in ({"model_type": "llama"} | sizes).items()]
    text = ("--task.name=causal_lm", f"--task.dataset={data}", "--task.sequence_length=32", *model)
    run = launch("cpu", *text, "--max_steps=20", "--optim.lr=1e-2", "--log_every=1", project=project).succeeded()
    assert run.losses[-1] < run.losses[0] - 1
    assert run.summary["eval/loss"] < run.losses[0] - 1
    assert (run.folder / "model" / "tokenizer.json").exists()
