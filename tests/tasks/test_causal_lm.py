"""A language model of a few layers learns to count."""

import json
import random
from pathlib import Path

import pytest

from src.config.errors import UserError
from tests.task_tests import TaskTests


class TestCausalLM(TaskTests):
    settings = """
        --task.name=causal_lm --task.dataset={folder} --task.sequence_length=64 --task.architecture.model_type=llama
        --task.architecture.hidden_size=32 --task.architecture.intermediate_size=64
        --task.architecture.num_hidden_layers=2 --task.architecture.num_attention_heads=4
        --task.architecture.num_key_value_heads=2 --max_steps=8 --global_batch_size=8 --optim.lr=1e-4
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
            (folder / f"{part}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))

    def test_a_bad_row_is_named(self, tmp_path: Path) -> None:
        self.write(tmp_path)
        file = tmp_path / "train.jsonl"
        file.write_text(file.read_text() + '{"prompt": "count 1:", "completion": ""}\n')
        task = self.task(tmp_path)
        with pytest.raises(UserError, match=r"train\.jsonl, line 81: "):
            task.build_datasets()
