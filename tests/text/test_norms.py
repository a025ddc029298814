"""log_norms on a language model: its blocks as FSDP wraps them, and what is outside."""

import math
from pathlib import Path

import pytest

from tests.launching import Launch
from tests.text import tiny


def test_a_block_is_what_fsdp_wraps_and_the_rest_goes_by_module(launch: Launch, models: Path, tmp_path: Path) -> None:
    """Tried without removing FSDP's prefix: each linear layer is a block of its own."""
    task = ("--task.name=causal_lm", f"--task.model={models / 'llama'}", "--task.sequence_length=64",
            f"--task.dataset={tiny.questions(tmp_path / 'data.jsonl')}")  # fmt: skip
    settings = (*task, "--max_steps=1", "--global_batch_size=8", "--log_every=1", "--log_norms=true")
    record = launch("fsdp", *settings, "--optim.name=muon", processes=2).succeeded().records[0]
    norms = {name.partition("/lm.")[2]: value for name, value in record.items() if name.startswith("train/grad_norm/")}
    assert set(norms) == {"model.embed_tokens", "model.layers.0", "model.layers.1", "model.norm", "lm_head"}
    assert math.hypot(*norms.values()) == pytest.approx(record["train/grad_norm"], rel=1e-5)
