"""Names of people and places in sentences."""

import json
import random
from pathlib import Path

import pytest

from src.config.errors import UserError
from tests.task_tests import TaskTests
from tests.tasks.encoder import write_encoder


class TestTokenClassification(TaskTests):
    settings = """
        --task.name=token_classification --task.model={folder}/model --task.dataset={folder}/sentences
        --task.sequence_length=64 --task.dropout=0 --max_steps=8 --global_batch_size=16 --optim.lr=1e-4
    """
    """An epoch has three steps, the last of 15 sentences: one of two processes gets 7."""
    mistake = "--task.label_colunm=tags", "unknown setting, did you mean task.label_column?"

    @staticmethod
    def write(folder: Path) -> None:
        """Write 47 sentences to train on and 13 to evaluate on, and a model."""
        draw = random.Random(0)
        (folder / "sentences").mkdir()
        for part, count in (("train", 47), ("dev", 13)):
            rows = []
            for _ in range(count):
                person, place = draw.choice([["Anna"], ["Tom", "Smith"]]), draw.choice(["Oslo", "Paris"])
                tags = ["B-PER", "I-PER"][: len(person)]
                rows.append({"tokens": [*person, "saw", place], "tags": [*tags, "O", "B-LOC"]})
            (folder / f"sentences/{part}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        write_encoder(folder / "model")

    def test_a_row_that_does_not_fit_is_named(self, tmp_path: Path) -> None:
        self.write(tmp_path)
        file = tmp_path / "sentences/train.jsonl"
        file.write_text(file.read_text() + '{"tokens": ["Anna", "sleeps"], "tags": ["B-PER"]}\n')
        task = self.task(tmp_path)
        with pytest.raises(UserError, match="row 48 of the training data has 2 words, tagged B-PER: .*1 of 48 rows"):
            task.build_datasets()
