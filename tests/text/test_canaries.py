"""What is relied on in libraries where transformers is used."""

from pathlib import Path
from threading import Thread

import torch
from transformers import AttentionInterface, LlamaConfig
from transformers.masking_utils import create_causal_mask

from tests.test_canaries import launched


def test_fsdp_cannot_wrap_a_block_around_the_input_embeddings(tmp_path: Path) -> None:
    """src/tasks/text/pretrained.py: why fsdp_blocks leaves BertEmbeddings out."""
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


def test_transformers_makes_no_mask_for_attention_that_names_none() -> None:
    """text/attention.py: why the kernel is registered, but no mask. Else packed documents have a dense one."""
    AttentionInterface.register("without a mask", lambda *_: None)
    positions = torch.tensor([[0, 1, 2, 0, 1], [0, 1, 0, 1, 2]])  # two rows of two documents each
    config = LlamaConfig()
    for attention, size in (("sdpa", (2, 1, 5, 5)), ("without a mask", None)):
        config._attn_implementation = attention
        mask = create_causal_mask(config, torch.zeros(2, 5, 8), None, None, position_ids=positions)
        assert getattr(mask, "shape", None) == size


def test_cudnn_attention_is_switched_off_in_all_threads() -> None:
    """src/tasks/text/pretrained.py: the backward pass runs in threads of its own."""
    found = []
    for is_on in (True, False):
        torch.backends.cuda.enable_cudnn_sdp(is_on)
        thread = Thread(target=lambda: found.append(torch.backends.cuda.cudnn_sdp_enabled()))
        thread.start()
        thread.join()
    assert found == [True, False]
