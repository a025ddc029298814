"""Frozen weights in 4 bits, under adapters: NF4, with its scales in 8 bits, as in QLoRA (Dettmers et al. 2023,
https://arxiv.org/abs/2305.14314), by bitsandbytes."""

from typing import Any

import torch
from accelerate import PartialState
from accelerate.state import AcceleratorState
from accelerate.utils import DistributedType
from peft.import_utils import is_bnb_4bit_available
from transformers import BitsAndBytesConfig
from transformers.integrations.bitsandbytes import replace_with_bnb_linear
from transformers.quantizers.base import get_keys_to_not_convert

from src.config.errors import UserError


def require_four_bits(is_sharded: bool) -> None:
    """Raise a UserError if a model's weights can't be in 4 bits, because of what is installed, or of FSDP."""
    setting = "task.lora.base_dtype=nf4"
    if not is_bnb_4bit_available():
        raise UserError(f"{setting}: needs bitsandbytes; `pip install -e '.[nf4]'`")
    if is_sharded:
        # what FSDP gathers are bytes without the scales that they are read with
        hint = "take accelerate_configs/ddp.yaml or single_gpu.yaml, or task.lora.base_dtype=bf16"
        raise UserError(f"{setting}: FSDP cannot shard 4-bit weights (bitsandbytes issue 1945); {hint}")


def loading_options(base_dtype: str | None) -> dict[str, Any]:
    """Return what `from_pretrained` needs to load linear layers in 4 bits, except for the output, which compute in
    bf16; nothing for another type than nf4. A tensor at a time is quantized, on the device that will hold it: on a CPU,
    8 billion weights take minutes."""
    if base_dtype != "nf4":
        return {}
    require_four_bits(is_sharded=False)
    quantization = BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=torch.bfloat16,
    )
    return {"quantization_config": quantization, "device_map": {"": PartialState().device}}


def give_four_bits(model: Any) -> None:  # room: plan
    """Put layers of 4 bits in the place of a model's linear layers, except for the output, on the GPU, with no values.
    Raise a UserError where `load_model` would."""
    require_four_bits(AcceleratorState().distributed_type == DistributedType.FSDP)
    options: Any = loading_options("nf4")["quantization_config"]
    replace_with_bnb_linear(model, get_keys_to_not_convert(model), options)
    for layer in model.modules():
        weight: Any = getattr(layer, "weight", None)
        if getattr(weight, "quant_type", None):
            dense = torch.empty(layer.out_features, layer.in_features, dtype=torch.bfloat16)
            packed = type(weight)(dense, requires_grad=False, quant_type="nf4", compress_statistics=True)
            layer.weight = packed.to(AcceleratorState().device)


def keep_layout(model: Any) -> None:
    """Have an evaluation leave the weights as they are: on a CPU with AVX512-BF16, bitsandbytes 0.50 would reorder them
    for kernels without a backward pass, and gradients would stop there from then on."""
    for layer in model.modules():
        if hasattr(layer, "support_avx512bf16_for_cpu"):
            layer.support_avx512bf16_for_cpu = False
