"""A language model of a few layers learns to count."""

import random
from pathlib import Path

from tests.task_tests import TaskTests
from tests.tasks.tiny_text import LLAMA, write_rows


class TestCausalLM(TaskTests):
    settings = f"""{LLAMA}
        --task.name=causal_lm --task.dataset={{folder}} --task.sequence_length=64
        --max_steps=8 --global_batch_size=8 --optim.lr=1e-4
    """
    """Several rows are packed into a sequence; the last batch of an epoch is smaller than the others."""
    learns = "--max_steps=60 --optim.lr=1e-2"
    mistake = "--task.sequence_lenght=64", "unknown setting, did you mean task.sequence_length?"

    @staticmethod
    def write(folder: Path) -> None:
        """Write 80 rows to train on and 30 to evaluate on."""
        draw = random.Random(0)
        for part, count in (("train", 80), ("dev", 30)):
            numbers = [[draw.randint(1, 9) for _ in range(draw.randint(1, 5))] for _ in range(count)]
            rows = [{"prompt": f"count {' '.join(map(str, row))}:", "completion": f" {len(row)}"} for row in numbers]
            write_rows(folder / f"{part}.jsonl", rows)

    def test_a_bad_row_is_named(self, tmp_path: Path) -> None:
        row = '{"prompt": "count 1:", "completion": ""}'
        self.require_refusal(tmp_path, "train.jsonl", row, r"train\.jsonl, line 81: ")
