"""What the tests of text share: tiny models and data, short runs on them, and a folder of each test's own."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import pytest

from tests.launching import Run, Whole
from tests.text.tasks import LM, TEXT

Trained = Callable[..., Run]
"""Of the fixture `trained`."""


@pytest.fixture(scope="session")
def made(shared: Path) -> Path:
    """A folder of models and data which all of pytest's processes share. Leave them as they are."""
    LM.ready(shared)
    return shared / LM.data.__name__


@pytest.fixture(scope="session")
def models(made: Path) -> Path:
    """A folder with the models `llama` and `bert`, and others."""
    return made / "models"


@pytest.fixture(scope="session")
def trained(whole: Whole, shared: Path) -> Trained:
    """trained("lm", "fsdp"): a short run of this task of tests/text/tasks.py; the same for all who ask for it."""

    def trained(name: str, yaml: str = "alone", *arguments: str, **more: Any) -> Run:
        return TEXT[name].ready(shared).run(whole, yaml, *arguments, **more)

    return trained


@pytest.fixture
def own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The current one, with a cache in it: the environment is read when `datasets` is imported, too late for it."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")


@pytest.fixture(autouse=True)
def _is_in_own_folder(own_folder: None) -> None:
    """Each test of text is."""
