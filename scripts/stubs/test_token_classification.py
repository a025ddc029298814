"""Names in sentences: one process and two train alike, a stopped run goes on, and what was trained is exported."""

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate.utils import set_seed
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForMaskedLM

from src.config.errors import UserError
from src.start import run_settings
from src.tasks.base import TaskState, samples
from src.tasks.text.tokenizing import byte_tokenizer
from tests.launching import Launch, Run, mistakes

SHORT = (
    "--task.name=token_classification", "--task.model={folder}/model", "--task.dataset={folder}/sentences",
    "--task.sequence_length=64", "--task.dropout=0", "--max_steps=8", "--log_every=1", "--global_batch_size=16",
    "--optim.lr=1e-4", "--optim.warmup_steps=0",
)  # fmt: skip
"""An epoch has three steps, the last of 15 sentences: one of two processes gets 7."""
LEARNS = ("--max_steps=60", "--optim.lr=3e-3")
MISTAKE = "--task.label_colunm=tags", "unknown setting, did you mean task.label_column?"


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
    write_model(folder / "model")


# a tiny encoder


# the tests of every task


def test_a_row_that_does_not_fit_is_named(tmp_path: Path) -> None:
    write(tmp_path)
    file = tmp_path / "sentences/train.jsonl"
    file.write_text(file.read_text() + '{"tokens": ["Anna", "sleeps"], "tags": ["B-PER"]}\n')
    task = run_settings([word.replace("{folder}", str(tmp_path)) for word in SHORT]).task
    with pytest.raises(UserError, match="row 48 of the training data has 2 words, tagged B-PER: .*1 of 48 rows"):
        task.build_datasets()
