"""Texts: one process and two train alike, a stopped run goes on, and what was trained is exported."""

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
    "--task.name=text_classification", "--task.model={folder}/model", "--task.dataset={folder}/texts",
    "--task.sequence_length=64", "--task.dropout=0", "--max_steps=8", "--log_every=1", "--global_batch_size=16",
    "--optim.lr=1e-4", "--optim.warmup_steps=0",
)  # fmt: skip
"""An epoch has three steps, the last of 15 texts: one of two processes gets 7."""
LEARNS = ("--max_steps=60", "--optim.lr=3e-3")
MISTAKE = "--task.text_colunm=text", "unknown setting, did you mean task.text_column?"


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
    write_model(folder / "model")


# a tiny encoder


# the tests of every task


def test_a_bad_row_is_named(tmp_path: Path) -> None:
    write(tmp_path)
    file = tmp_path / "texts/train.jsonl"
    file.write_text(file.read_text() + '{"text": "No label."}\n')
    task = run_settings([word.replace("{folder}", str(tmp_path)) for word in SHORT]).task
    with pytest.raises(UserError, match=r"train\.jsonl, line 48: "):
        task.build_datasets()
