"""python -m src.tools.checkpoints export, of transformers."""

import shutil
from pathlib import Path

import pytest

from src.tasks.text.reading import TextTask
from src.tools.checkpoints import main
from tests.text.conftest import Trained

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")  # in this process, to read


@pytest.mark.parametrize(("kind", "yaml"), [("lm with adapters", "fsdp"), ("classifier", "alone")])
def test_export_of_a_transformer(
    trained: Trained, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, yaml: str
) -> None:
    """The same files as the run's, the same weights to the last bit; a classifier's labels are known without data."""
    run = trained(kind, yaml)
    monkeypatch.delattr(TextTask, "open_rows")
    copy = shutil.copytree(run.folder / "checkpoints" / "step_00000012", tmp_path / "elsewhere")
    assert not main(["export", str(copy), f"--output={tmp_path}/model"])
    there = {path.name for path in (run.folder / "model").iterdir()}
    assert {path.name for path in (tmp_path / "model").iterdir()} == there
    (file,) = (name for name in there if name.endswith(".safetensors"))
    assert (tmp_path / "model" / file).read_bytes() == (run.folder / "model" / file).read_bytes()
