"""What comes with the project for GitHub, git, Docker and coding assistants names what is there."""

import os
import re
import subprocess
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name

from tests.launching import PROJECT
from tests.pages.links import leads_somewhere, links_of, pages

TARGETS = {
    target
    for file in (PROJECT / "Makefile", *PROJECT.glob("*/*.mk"))
    for target in re.findall(r"^([a-z-]+):", file.read_text(), re.MULTILINE)
}
TESTS = [*PROJECT.glob("tests/**/test_*.py")]


def read(name: str) -> str:
    return (PROJECT / name).read_text()


def find(pattern: str, name: str) -> list[Any]:
    return re.findall(pattern, read(name), re.MULTILINE)


def test_make_targets_that_the_pages_name_exist() -> None:
    for page in pages():
        called = find(r"(?:`|^ *)make ([a-z-]+)(?=`|  | [A-Z]+=|$)", str(page))
        assert set(called) <= TARGETS, page


def test_files_and_tests_that_the_guides_name_exist() -> None:
    tests = " ".join(path.name for path in TESTS)
    for guide in ("AGENTS.md", "CONTRIBUTING.md"):
        text = re.sub(r"\[[^]]*\]\(|\.venv/bin/", " ", read(guide))  # of a link, only its target
        paths = re.findall(r"[\w.-]+/[\w./-]*\w|\w+\.(?:md|py|txt)\b", text)
        assert len(paths) > 10
        assert not [path for path in paths if not (PROJECT / path).exists()], guide
        chosen = {word for words in re.findall(r"-k ([^']+)", text) for word in re.findall(r"\w+", words)} - {"or"}
        assert chosen
        assert not [word for word in chosen if word not in tests], guide
        assert read(guide).count("\n") <= 60


def test_the_readme_begins_by_training_testing_and_chatting() -> None:
    """Each sets up what it needs, and what is tested there is tested on each push."""
    block = read("README.md").split("```\n")[1]
    assert re.findall(r"^make ([a-z-]+) +# .*minutes", block, re.MULTILINE) == ["train", "test", "chat"]
    rules = read("Makefile") + read("examples/text.mk")
    assert {"train", "test", "chat"} <= {*re.findall(r"^([a-z-]+): setup\b", rules, re.MULTILINE)}
    assert find(r"^make ([a-z-]+)$", ".ci/run") == ["test", "lint", "test-gpu"]


def test_the_readme_is_short() -> None:
    assert read("README.md").count("\n") <= 120


def test_what_the_readme_says_of_others_is_dated_and_each_cell_links_to_what_shows_it() -> None:
    """To a file at a commit or a tag, which stays as it was read, or to a page of the other project."""
    section = read("README.md").split("## Beside others\n")[1].split("\n### ")[0]
    assert re.search(r"Read on \d+ [A-Z][a-z]+ 20\d\d", section)
    rows = [row.strip("|").split(" | ") for row in section.splitlines() if row.startswith("| [")]
    assert len(rows) >= 7
    for name, *cells in rows:
        assert len(cells) == 2, name
        for cell in (name, *cells):
            assert links_of(cell), (name, cell)
        abroad = [target for cell in cells for target in links_of(cell) if target.startswith("http")]
        assert abroad, name
        for target in abroad:
            pinned = r"https://github\.com/[\w-]+/[\w-]+/(blob|tree|commit)/([0-9a-f]{12}|v\d+\.\d+\.\d+)(/\S+|$)"
            assert re.match(pinned, target), target


def test_the_recipes_of_the_readme_are_configs_with_result_time_and_command() -> None:
    section = read("README.md").split("## Recipes\n")[1].split("\n## ")[0]
    rows = [re.split(r" *\| *", row.strip("| ")) for row in section.splitlines() if row.startswith("| [")]
    assert all(len(row) == 5 and all(row) for row in rows)
    named = {target for row in rows for target in links_of(row[0])}
    assert named == {str(file.relative_to(PROJECT)) for file in PROJECT.glob("configs/*.yaml")}


def test_each_page_asks_one_question_and_begins_with_an_example() -> None:
    asked = [*PROJECT.glob("docs/*.md"), *PROJECT.glob("plan/*.md")]
    assert 0 < len(asked) <= 35
    for page in asked:
        title, *lines = page.read_text().splitlines()[:10]
        assert re.fullmatch(r"# [^?]+\?", title), page
        assert any(line.startswith(("```", "    ")) for line in lines), page


def test_each_link_of_a_page_leads_to_a_file_and_to_one_of_its_headings() -> None:
    """And each page that code names is there."""
    for page in pages():
        for target in links_of(page.read_text()):
            is_of_github = re.match(r"(\.\./)+(actions|generate|issues)\b", target)
            assert is_of_github or leads_somewhere(page, target), (page, target)
    for folder in ("src", "plan", "benchmarks", "launchers", "configs", "accelerate_configs", "examples"):
        for file in filter(Path.is_file, PROJECT.glob(f"{folder}/**/*.*")):
            # a page "at" a commit is another project's
            named = re.findall(r"\b(?:docs|plan)/[\w/-]+\.md\b(?! at )", file.read_text(errors="ignore"))
            assert not [name for name in named if not (PROJECT / name).exists()], file


def test_the_version_is_in_one_place_and_the_changelog_begins_with_it() -> None:
    project = tomllib.loads(read("pyproject.toml"))["project"]
    assert find(r"^## (\S+)", "CHANGELOG.md")[0] == project["version"]
    others = [name for name in ("CITATION.cff", "README.md", "train.py") if project["version"] in read(name)]
    assert not others


def test_assistants_of_each_kind_read_one_guide() -> None:
    assert read("CLAUDE.md") == "@AGENTS.md\n"


def test_a_report_of_a_bug_has_what_explains_a_run() -> None:
    """The settings, what came of them, and what the machine made of them."""
    form = yaml.safe_load(read(".github/ISSUE_TEMPLATE/bug.yml"))
    required = [field["attributes"]["label"] for field in form["body"] if field.get("validations", {}).get("required")]
    for name in ("config.yaml", "summary.json", "--dry-run"):
        assert any(f"`{name}`" in label for label in required), name


def test_each_promise_links_to_the_file_of_its_tests() -> None:
    """A row without one is a promise that nothing keeps. (That each file is there, the test of links says.)"""
    rows = [line for line in read("docs/promises.md").splitlines() if re.match(r"\| (?!---)", line)]
    without = [row for row in rows if not re.search(r"\]\(\.\./(?:tests|plan)/|\]\(#", row)]
    assert len(rows) > 60
    headers = r"\| (tests?|test file|kept by|the nearest that we found) \|$"
    assert all(re.search(headers, row) for row in without), without


def test_the_image_has_what_make_setup_needs_and_no_outputs() -> None:
    needed = find(r"^\$\(VENV\)/installed: (.*)$", "Makefile")[0].split()
    assert {"Makefile", *needed} <= set(find(r"^COPY (.*)$", "Dockerfile")[0].split())
    ignored = {line.removeprefix("**/") for line in read(".dockerignore").split()}
    assert {line.strip("/") for line in read(".gitignore").split()} <= ignored


def test_each_test_is_in_one_part_of_the_nightly_run() -> None:
    parts = find(r"make testall ARGS='?([^\n']+)", ".github/workflows/nightly.yml")
    paths = [path for part in parts for pattern in part.split() for path in PROJECT.glob(pattern)]
    files = [file for path in paths for file in (*path.glob("**/test_*.py"), path)]
    emulated = {*PROJECT.glob("tests/plan/gpu/test_*.py")}  # which `make test-gpu` runs
    assert sorted(file for file in files if file.is_file() and file not in emulated) == sorted({*TESTS} - emulated)


def test_the_lock_is_of_what_is_required() -> None:
    """`uv lock` brings it up to date."""
    extras = tomllib.loads(read("pyproject.toml"))["project"]["optional-dependencies"]
    lines = [line.partition("#")[0] for line in read("requirements.txt").splitlines()]
    required = [Requirement(line) for lines in (filter(None, lines), *extras.values()) for line in lines]
    (project,) = (package for package in tomllib.loads(read("uv.lock"))["package"] if "editable" in package["source"])
    locked = project["metadata"]["requires-dist"]
    assert {(canonicalize_name(one.name), one.specifier) for one in required} == {
        (one["name"], SpecifierSet(one.get("specifier", ""))) for one in locked
    }
    assert set(project["metadata"]["provides-extras"]) == extras.keys()


@pytest.mark.parametrize("has_uv", [True, False])
def test_make_setup_installs_by_uv_and_says_why_where_it_takes_pip(tmp_path: Path, has_uv: bool) -> None:
    """With a Python that only notes how it is called."""
    for name in ("Makefile", "pyproject.toml", "requirements.txt", "requirements-dev.txt"):
        (tmp_path / name).write_text(read(name))
    stub = tmp_path / "python"
    stub.write_text(
        f"""#!/bin/sh
echo "$*" >> {tmp_path}/calls
case "$*" in
  *config*) exit 1;;
  "-m venv"*) mkdir -p {tmp_path}/.venv/bin; cp $0 {tmp_path}/.venv/bin/python; cp $0 {tmp_path}/.venv/bin/uv;;
  *"pip install"*uv\\>*) {"true" if has_uv else "echo no such index; exit 1"};;
esac
"""
    )
    stub.chmod(0o755)
    environment = {"PATH": os.environ["PATH"]}  # without what the `make` that runs the tests was given
    command = ["make", "setup", f"PYTHON={stub}"]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    *_, last = (tmp_path / "calls").read_text().splitlines()
    assert last.endswith("-r requirements.txt -r requirements-dev.txt")
    assert last.startswith("pip install --quiet --compile-bytecode" if has_uv else "-m pip install --quiet")
    assert ("uv could not install it: no such index" in done.stdout) != has_uv
    assert (tmp_path / ".venv" / "installed").exists()
