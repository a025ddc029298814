"""What is missing or of another version is one line, before any library is imported."""

import ast
import importlib.metadata
import subprocess
import sys

import pytest

from src.config.requirements import lacking
from tests.launching import PROJECT, needs

REAL = importlib.metadata.version


def install(monkeypatch: pytest.MonkeyPatch, **versions: str | None) -> None:
    """Let these libraries be of these versions; None: not installed."""

    def version(name: str) -> str:
        found = versions.get(name, REAL(name))
        if found is None:
            raise importlib.metadata.PackageNotFoundError(name)
        return found

    monkeypatch.setattr(importlib.metadata, "version", version)


def test_an_environment_that_is_half_there_is_one_line_before_anything_is_imported() -> None:
    """An interpreter without any library. Tried without the look: a traceback."""
    assert lacking() == []
    ended = subprocess.run([sys.executable, "-S", "train.py"], cwd=PROJECT, capture_output=True, text=True)
    assert ended.returncode == 2
    (line,) = ended.stderr.splitlines()
    assert line.startswith("not installed: torch, torchvision, accelerate, datasets, ")
    assert line.endswith(f"{sys.executable} -m pip install -e '{PROJECT}'")


@pytest.mark.parametrize(
    ("versions", "says"),
    [
        ({"evaluate": None, "tqdm": None}, "not installed: evaluate, tqdm: "),
        ({"torch": "2.10.0+cu128"}, "torch 2.10.0+cu128 is installed, and torch>=2.11 is needed: "),
        ({"torch": "2.11.0a0"}, "torch 2.11.0a0 is installed, and torch>=2.11 is needed: "),
        # NVIDIA's images have pre-releases; tried without `prereleases`: refused
        ({"torch": "2.12.0a0+0123456.nv26.06"}, None),
    ],
)
def test_what_is_missing_or_too_old_is_one_line(
    monkeypatch: pytest.MonkeyPatch, versions: dict[str, str | None], says: str | None
) -> None:
    install(monkeypatch, **versions)
    found = lacking()
    assert len(found) == bool(says)
    assert not says or found[0].startswith(says)


@needs("src/tasks/text")
@pytest.mark.parametrize("version", ["5.16.1", "6.0.0"])
def test_so_is_a_transformers_that_is_not_asked_for(monkeypatch: pytest.MonkeyPatch, version: str) -> None:
    install(monkeypatch, transformers=version)
    assert lacking() == []  # what has nothing to do with texts goes on
    (line,) = lacking("text")
    assert line.startswith(f"transformers {version} is installed, and transformers<6,>=5.17 is needed: ")
    assert line.endswith(f"pip install -e '{PROJECT}[text]'")


def test_an_older_python_can_read_the_line_about_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """By its grammar. train.py imports src/__init__.py first, and that one this."""
    for file in ("train.py", "src/__init__.py", "src/config/requirements.py"):
        ast.parse((PROJECT / file).read_text(), feature_version=(3, 8))
    monkeypatch.setattr(sys, "version_info", (3, 10, 4))
    (line,) = lacking()
    assert line.startswith("Python 3.11 or newer is needed, and this is ")
