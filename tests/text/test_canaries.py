"""What is relied on in libraries where transformers is used."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.launching import PROJECT
from tests.test_canaries import launched


def test_fsdp_cannot_wrap_a_block_around_the_input_embeddings(tmp_path: Path) -> None:
    """src/models/pretrained.py: why fsdp_blocks leaves BertEmbeddings out."""
    code = """
import torch
from accelerate import Accelerator, PartialState
from transformers import BertConfig, BertModel

PartialState(cpu=True)._shared_state["distributed_type"] = "MULTI_GPU"
model = BertModel(BertConfig(hidden_size=8, num_hidden_layers=1, num_attention_heads=1, intermediate_size=8))
assert "BertEmbeddings" in model._no_split_modules
try:
    Accelerator(cpu=True).prepare(model, torch.optim.AdamW(model.parameters()))
except TypeError:
    say("failed")
"""
    fsdp = {
        "fsdp_version": 2,
        "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
        "fsdp_cpu_ram_efficient_loading": False,
    }
    run = launched(tmp_path, code, distributed_type="FSDP", fsdp_config=fsdp)
    assert run.stdout.split() == ["failed", "failed"]


@pytest.mark.slow
def test_evaluate_imports_transformers_pipelines() -> None:
    """src/tasks/__init__.py: why a metric is imported when it is first needed."""
    probe = "import sys, evaluate; sys.exit('transformers.pipelines' not in sys.modules)"
    assert subprocess.run([sys.executable, "-W", "ignore", "-c", probe], cwd=PROJECT).returncode == 0
