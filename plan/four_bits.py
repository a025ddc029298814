"""Weights in 4 bits without values, for adapters over a language model."""

from typing import Any

import torch
from accelerate.state import AcceleratorState
from accelerate.utils import DistributedType
from transformers.integrations.bitsandbytes import replace_with_bnb_linear
from transformers.quantizers.base import get_keys_to_not_convert

from src.tasks.text.adapters import four_bits, require_four_bits


def give_four_bits(model: Any) -> None:
    """Replace a model's linear layers, except for the output, with 4-bit layers on the GPU, without values. Raise a
    UserError where training would."""
    require_four_bits(AcceleratorState().distributed_type == DistributedType.FSDP)
    replace_with_bnb_linear(model, get_keys_to_not_convert(model), four_bits(torch.bfloat16))
    for layer in model.modules():
        weight: Any = getattr(layer, "weight", None)
        if getattr(weight, "quant_type", None):
            dense = torch.empty(layer.out_features, layer.in_features, dtype=torch.bfloat16)
            packed = type(weight)(dense, requires_grad=False, quant_type="nf4", compress_statistics=True)
            layer.weight = packed.to(AcceleratorState().device)
