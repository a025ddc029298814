"""Pictures, red ones and blue ones."""

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from src.config.errors import UserError
from tests.task_tests import TaskTests


class TestImageClassification(TaskTests):
    settings = """
        --task.name=image_classification --task.data_dir={folder} --task.model=shufflenet_v2_x0_5 --task.size=64
        --max_steps=5 --global_batch_size=16 --optim.lr=1e-6
    """
    """An epoch has three steps, the last of 15 pictures: one of two processes gets 7. At ten times this rate, ReLUs
    that rounding flips change the gradient's norm by 1e-3 in the fourth step, on some processors; here by 7e-7."""
    learns = "--max_steps=30 --optim.lr=3e-3"
    mistake = "--task.sise=64", "unknown setting, did you mean task.size?"

    @staticmethod
    def write(folder: Path) -> None:
        """Write 47 pictures to train on and 13 to evaluate on, red ones and blue ones, as the task reads them."""
        draw = np.random.default_rng(0)
        for part, count in (("train", 47), ("val", 13)):
            for i in range(count):
                name, channel = ("red", 0) if i % 2 else ("blue", 2)
                pixels = draw.integers(0, 100, (32, 32, 3), np.uint8)
                pixels[:, :, channel] += 150
                file = folder / part / name / f"{i}.png"
                file.parent.mkdir(parents=True, exist_ok=True)
                Image.fromarray(pixels).save(file)

    def test_a_class_that_is_missing_and_a_broken_picture_are_one_line(self, tmp_path: Path) -> None:
        self.write(tmp_path)
        task = self.task(tmp_path)
        train, _ = task.build_datasets()
        (tmp_path / "train/blue/0.png").write_text("a picture")
        with pytest.raises(UserError, match=r"train/blue/0\.png: cannot be read: "):
            train[0]
        for file in (tmp_path / "val/red").iterdir():
            file.unlink()
        (tmp_path / "val/red").rmdir()
        with pytest.raises(UserError, match="train and val do not both have the class red"):
            task.build_datasets()
