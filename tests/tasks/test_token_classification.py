"""Names of people and places in sentences."""

import random
from pathlib import Path

from tests.task_tests import TaskTests
from tests.tasks.tiny_text import write_encoder, write_rows


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
        for part, count in (("train", 47), ("dev", 13)):
            rows = []
            for _ in range(count):
                person, place = draw.choice([["Anna"], ["Tom", "Smith"]]), draw.choice(["Oslo", "Paris"])
                tags = ["B-PER", "I-PER"][: len(person)]
                rows.append({"tokens": [*person, "saw", place], "tags": [*tags, "O", "B-LOC"]})
            write_rows(folder / f"sentences/{part}.jsonl", rows)
        write_encoder(folder / "model")

    def test_a_row_that_does_not_fit_is_named(self, tmp_path: Path) -> None:
        row = '{"tokens": ["Anna", "sleeps"], "tags": ["B-PER"]}'
        says = "row 48 of the training data has 2 words, tagged B-PER: .*1 of 48 rows"
        self.require_refusal(tmp_path, "sentences/train.jsonl", row, says)
