"""task.lora.base_dtype=nf4: frozen weights in 4 bits, by bitsandbytes. In this process, or in runs on one and two."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from transformers import AutoModelForCausalLM

from src.config.errors import UserError
from src.tasks.base import TaskState
from src.tasks.text import model
from tests.faults.runs import whole_tensors
from tests.launching import Launch, slow
from tests.text import tiny
from tests.text.conftest import Trained
from tests.text.tasks import TEXT

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")  # in this process, to read
WIDE = tiny.LLAMA | {"hidden_size": 128, "intermediate_size": 256}
"""Sizes of layers beside which the tables that each has in common are small."""
NAME = "lm in 4 bits"


def task(folder: Path) -> Any:
    return tiny.task(model=str(folder), sequence_length=16, lora={"r": 4, "base_dtype": "nf4"})


def test_the_base_takes_half_a_byte_for_a_weight_and_adapters_are_fp32(tmp_path: Path) -> None:
    """With its scales. Embedding, norms and output are bf16. On a CPU with AVX512-BF16, bitsandbytes would reorder the
    weights in an evaluation, for kernels without a backward pass."""
    lm = task(tiny.saved("llama", tmp_path / "wide", **WIDE)).build_model()
    base = [layer for layer in lm.modules() if hasattr(layer, "quant_state")]
    assert {layer.support_avx512bf16_for_cpu for layer in base} == {False}
    held = sum(tensor.nbytes for layer in base for tensor in layer.state_dict().values())
    weights = sum(layer.in_features * layer.out_features for layer in base)
    assert len(base) == 14
    assert 0.5 < held / weights <= 0.6
    others = {p.dtype for name, p in lm.named_parameters() if not p.requires_grad and "base_layer" not in name}
    assert others == {torch.bfloat16}
    assert {p.dtype for p in lm.parameters() if p.requires_grad} == {torch.float32}


@pytest.mark.parametrize(
    ("name", "few", "last", "within"),
    [(NAME, [], 1, 0.05), slow("chat", ["--max_steps=2", "--task.lora.merge=false"], 2, 0.1)],
)
def test_the_loss_is_near_that_of_a_bf16_base(
    trained: Trained, name: str, few: list[str], last: int, within: float
) -> None:
    """Of the chat model's real weights within 10%, before a step and after it; measured: 6% and 1.5%. Larger models
    lose less by four bits."""
    bf16, nf4 = (
        trained(name, "alone", *few, *base, launcher_arguments=("--mixed_precision=bf16",))
        for base in (["--task.lora.base_dtype=bf16"], [] if name == NAME else ["--task.lora.base_dtype=nf4"])
    )
    assert nf4.losses != bf16.losses
    assert nf4.losses[-last:] == pytest.approx(bf16.losses[-last:], rel=within)
    if name == NAME:
        assert len(nf4.losses) == 50
        assert nf4.losses[-1] < nf4.losses[0] - 0.5
    assert "frozen weights in nf4" in nf4.stdout


def test_adapters_alone_are_saved_and_the_merged_model_is_dense(trained: Trained, models: Path) -> None:
    """It is the sum of what the 4 bits stand for and the adapters, and gives the losses of the evaluation."""
    folder = trained(NAME).folder
    assert all(".lora_" in name for name in whole_tensors(folder / "checkpoints/step_00000050"))
    with safe_open(folder / "model/adapter_model.safetensors", "pt") as file:
        assert all(".lora_" in name for name in file.keys())  # noqa: SIM118  # it is no dictionary
    quantized = task(models / "spread").load_export(folder / "model")
    merged: Any = AutoModelForCausalLM.from_pretrained(folder / "model/merged", dtype=torch.float32)
    tokens = torch.arange(32)[None]
    with torch.no_grad():
        expected = quantized.lm(input_ids=tokens).logits
        found = merged(input_ids=tokens).logits
    # both are rounded to bf16, of 8 bits, in a dozen places
    assert (found - expected).norm() < 0.05 * expected.norm()
    assert not any("absmax" in name for name in merged.state_dict())


def test_what_cannot_be_in_4_bits_is_one_line(
    shared: Path, models: Path, launch: Launch, monkeypatch: pytest.MonkeyPatch
) -> None:
    refused = TEXT[NAME].ready(shared).run(launch, "fsdp_cp")
    assert refused.exit_code == 2
    assert refused.messages[0] == (
        "train.py: task.lora.base_dtype=nf4: FSDP cannot shard 4-bit weights (bitsandbytes issue 1945); use "
        "accelerate_configs/ddp.yaml or single_gpu.yaml, or task.lora.base_dtype=bf16"
    )
    with pytest.raises(UserError, match="^task.lora.base_dtype=nf4: needs --mixed_precision bf16 before train.py$"):
        task(models / "spread").begin(TaskState())
    monkeypatch.setattr(model, "is_bnb_4bit_available", lambda: False)
    with pytest.raises(
        UserError, match="^task.lora.base_dtype=nf4: needs bitsandbytes; `pip install -e '.\\[nf4\\]'`$"
    ):
        task(models / "spread").build_model()
