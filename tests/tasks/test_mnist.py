"""Handwritten digits, those of scikit-learn."""

from pathlib import Path

import pytest

from src.config.errors import UserError
from src.start import run_settings
from tests.task_tests import TaskTests


class TestMnist(TaskTests):
    settings = """
        --task.name=mnist --task.source=digits --task.dropout=0 --max_steps=8 --global_batch_size=250 --optim.lr=1e-4
    """
    """An epoch has six steps, the last of 188 digits."""
    learns = "--max_steps=40 --optim.lr=3e-3"
    mistake = "--task.dropuot=0.1", "unknown setting, did you mean task.dropout?"

    @staticmethod
    def write(folder: Path) -> None:
        """Nothing: scikit-learn comes with the digits."""

    def test_damaged_files_are_one_line(self, tmp_path: Path) -> None:
        folder = tmp_path / "MNIST/raw"
        folder.mkdir(parents=True)
        for part in ("train-images-idx3", "train-labels-idx1", "t10k-images-idx3", "t10k-labels-idx1"):
            (folder / f"{part}-ubyte").write_bytes(b"<html>")
        task = run_settings(["--task.name=mnist", f"--task.data_dir={tmp_path}", f"--output_dir={tmp_path}/run"]).task
        with pytest.raises(UserError, match="MNIST could be neither read from .* nor downloaded"):
            task.build_datasets()
