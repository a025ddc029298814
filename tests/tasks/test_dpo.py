"""A language model learns which of two answers to prefer."""

import math
import random
from pathlib import Path

import pytest

from tests.launching import Run
from tests.task_tests import TaskTests
from tests.tasks.tiny_text import LLAMA, write_rows


class TestDpo(TaskTests):
    settings = f"""{LLAMA}
        --task.name=dpo --task.dataset={{folder}} --task.sequence_length=64
        --max_steps=8 --global_batch_size=16 --optim.lr=1e-4
    """
    """An epoch has three steps, the last of 15 pairs: one of two processes gets 7."""
    learns = "--max_steps=40 --optim.lr=3e-3"
    mistake = "--task.bta=0.2", "unknown setting, did you mean task.beta?"

    @staticmethod
    def write(folder: Path) -> None:
        """Write 47 pairs to train on and 13 to evaluate on."""
        draw = random.Random(0)
        for part, count in (("train", 47), ("dev", 13)):
            things = [draw.choice(["lamp", "violin", "sofa"]) for _ in range(count)]
            rows = [
                {"prompt": f"Where is my {t}?\n", "chosen": f"Here, your {t}.", "rejected": f"No {t}!"} for t in things
            ]
            write_rows(folder / f"{part}.jsonl", rows)

    def test_the_model_begins_as_the_reference(self, alone: Run) -> None:
        """So the loss of the first step is log 2."""
        assert alone.losses[0] == pytest.approx(math.log(2), rel=1e-6)

    def test_a_bad_row_is_named(self, tmp_path: Path) -> None:
        row = '{"prompt": "Who?", "chosen": "", "rejected": "No."}'
        self.require_refusal(tmp_path, "train.jsonl", row, r"train\.jsonl, line 48: chosen is empty")
