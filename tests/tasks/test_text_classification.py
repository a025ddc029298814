"""Texts, good ones and bad ones."""

import random
from pathlib import Path

from tests.task_tests import TaskTests
from tests.tasks.tiny_text import write_encoder, write_rows


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
        for part, count in (("train", 47), ("dev", 13)):
            rows = []
            for _ in range(count):
                thing, (word, label) = draw.choice(["lamp", "sofa"]), draw.choice([("awful", "bad"), ("fine", "good")])
                rows.append({"text": f"The {thing} is {word}.", "label": label})
            write_rows(folder / f"texts/{part}.jsonl", rows)
        write_encoder(folder / "model")

    def test_a_bad_row_is_named(self, tmp_path: Path) -> None:
        self.require_refusal(tmp_path, "texts/train.jsonl", '{"text": "No label."}', r"train\.jsonl, line 48: ")
