"""What the tests of text share: tiny models, and a cache of each test's own."""

from pathlib import Path

import datasets
import pytest

from tests.text import tiny


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the models `llama` and `bert`. Leave them as they are."""
    folder = tmp_path_factory.mktemp("models")
    tiny.llama(folder / "llama")
    tiny.bert(folder / "bert")
    return folder


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The environment is read when `datasets` is imported: too late for it here."""
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
