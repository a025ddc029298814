"""What the tests of text share: tiny models and data, short runs on them, and a folder of each test's own."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import pytest

from tests.launching import Run, Whole
from tests.text.tasks import LM, TEXT

Trained = Callable[..., Run]
"""Type of the fixture `trained`."""


@pytest.fixture(scope="session")
def made(shared: Path) -> Path:
    """A folder of models and data, shared by all of pytest's processes: read it only."""
    LM.ready(shared)
    return shared / LM.data.__name__


@pytest.fixture(scope="session")
def models(made: Path) -> Path:
    """A folder with the models `llama`, `bert` and others: read it only."""
    return made / "models"


@pytest.fixture(scope="session")
def trained(whole: Whole, shared: Path) -> Trained:
    """trained("lm", "fsdp"): a short run of this task of tests/text/tasks.py, one for all tests that ask for it."""

    def trained(name: str, yaml: str = "alone", *arguments: str, **more: Any) -> Run:
        return TEXT[name].ready(shared).run(whole, yaml, *arguments, **more)

    return trained


@pytest.fixture
def own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the test's own folder the current one, with a cache of `datasets` in it."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")


@pytest.fixture(autouse=True)
def _is_in_own_folder(own_folder: None) -> None:
    """Give each test of text a folder of its own."""
