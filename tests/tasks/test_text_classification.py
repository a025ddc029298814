"""Texts, good ones and bad ones."""

import json
import random
from pathlib import Path

import pytest

from src.config.errors import UserError
from tests.task_tests import TaskTests
from tests.tasks.encoder import write_encoder


class TestTextClassification(TaskTests):
    settings = """
        --task.name=text_classification --task.model={folder}/model --task.dataset={folder}/texts
        --task.sequence_length=64 --task.dropout=0 --max_steps=8 --global_batch_size=16 --optim.lr=1e-4
    """
    """An epoch has three steps, the last of 15 texts: one of two processes gets 7."""
    mistake = "--task.text_colunm=text", "unknown setting, did you mean task.text_column?"

    @staticmethod
    def write(folder: Path) -> None:
        """Write 47 texts to train on and 13 to evaluate on, and a model."""
        draw = random.Random(0)
        (folder / "texts").mkdir()
        for part, count in (("train", 47), ("dev", 13)):
            rows = []
            for _ in range(count):
                thing, (word, label) = draw.choice(["lamp", "sofa"]), draw.choice([("awful", "bad"), ("fine", "good")])
                rows.append({"text": f"The {thing} is {word}.", "label": label})
            (folder / f"texts/{part}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        write_encoder(folder / "model")

    def test_a_bad_row_is_named(self, tmp_path: Path) -> None:
        self.write(tmp_path)
        file = tmp_path / "texts/train.jsonl"
        file.write_text(file.read_text() + '{"text": "No label."}\n')
        task = self.task(tmp_path)
        with pytest.raises(UserError, match=r"train\.jsonl, line 48: "):
            task.build_datasets()
