"""How a language model computes attention where several documents share a row.

transformers' own way (`sdpa`) is a mask of shape (batch, 1, length, length), which each layer reads and keeps. The
other ways need none: `varlen`, torch's kernel, and `flash_attention_2` take the documents' lengths, `flex` blocks.
"""

from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import activate_flash_attention_impl, restore_flash_attention_impl
from torch.nn.attention.varlen import varlen_attn
from transformers import AttentionInterface, PreTrainedModel

IMPLEMENTATIONS = {"varlen": "varlen", "flash_attention_2": "flash_attention_2", "flex": "flex_attention"}
"""Values of task.attention, and transformers' names for them."""
BY_LENGTHS = ("varlen", "flash_attention_2")
"""Those that take `document_lengths`."""
WITHOUT_EFFECT = {"cu_seq_lens_k", "max_length_k", "position_ids"}
"""What attention functions are handed that doesn't change the attention within a document."""

KERNELS = ("FA4", "FA3")
"""FlashAttention's newer kernels, fastest first, where their packages are installed (flash-attn-4; flash-attn-3). On
Hopper they take half the time of FlashAttention 2, which is torch's own."""


def activate_kernel(is_suitable: Callable[[], bool]) -> str:
    """Have torch's kernel, `varlen`, be the fastest that is installed and that `is_suitable`, asked once it is active,
    accepts. Return its name."""
    for name in KERNELS:
        with suppress(ImportError, RuntimeError):
            activate_flash_attention_impl(name)
            if is_suitable():
                return name
            restore_flash_attention_impl()
    return "FA2"


def set_attention(model: PreTrainedModel, name: str) -> None:
    """Have the model's text part compute attention in this way. Raise a ValueError if its class has one of its own."""
    AttentionInterface.register("varlen", varlen_attention)  # without an AttentionMaskInterface no mask is made
    model.set_attn_implementation(IMPLEMENTATIONS[name])
    if model.config.get_text_config()._attn_implementation != IMPLEMENTATIONS[name]:
        raise ValueError("its class computes attention in a way of its own")


def implementations(model: PreTrainedModel) -> dict[str, str]:
    """Return how each part of the model computes attention, as `set_attn_implementation` takes it."""
    parts = {name: getattr(model.config, name, None) for name in model.config.sub_configs}
    own = {"": model.config._attn_implementation}
    return own | {name: part._attn_implementation for name, part in parts.items() if part is not None}


def document_lengths(ends: list[int]) -> dict[str, Any]:
    """Return `cu_seq_lens`, where in the flattened batch each document begins and the last ends, of shape
    (documents + 1,), int32; and `max_length`, an int that none exceeds. `ends` is where each ends; padding is one too.

    A compiler would specialize on the longest length and on the number of documents: both are rounded up to a power of
    two, so that few of them occur. The documents that this adds have no tokens.
    """
    starts = [0, *ends]
    longest = max(end - start for start, end in zip(starts, ends, strict=False))
    cu_seq_lens = torch.full((_power_of_two(len(ends)) + 1,), ends[-1], dtype=torch.int32)
    cu_seq_lens[: len(starts)] = torch.tensor(starts, dtype=torch.int32)
    return {"cu_seq_lens": cu_seq_lens, "max_length": _power_of_two(longest)}


def _power_of_two(least: int) -> int:
    return 1 << (least - 1).bit_length()


def varlen_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    is_causal: bool | None = None,
    cu_seq_lens_q: Any = None,
    max_length_q: int = 0,
    **options: Any,
) -> tuple[Tensor, None]:
    """Return each token's attention to itself and to those before it in its document; for AttentionInterface.

    Args:
        query: shape (batch, heads, length, head size). `key` and `value` may have fewer heads.
        sliding_window: the most tokens that a token attends to, itself included; None: all.
        cu_seq_lens_q, max_length_q: those of `document_lengths`.

    Returns:
        Shape (batch, length, heads, head size), in the dtype of `value`: rotary embeddings may have made the others
        fp32 under autocast.

    Raises:
        ValueError: the model asks for more than the kernel can do.
    """
    is_causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    asked = {
        "dropout": dropout > 0,
        "mask": attention_mask is not None,
        "way to see later tokens": not is_causal,
        "cache": cu_seq_lens_q is None,
        "keys or values of another size": not query.shape[2:] == key.shape[2:] == value.shape[2:],
    }
    asked |= {n: option is not None and option is not False for n, option in options.items() if n not in WITHOUT_EFFECT}
    if any(asked.values()):
        raise ValueError(f"varlen attention has no {' and no '.join(name for name in asked if asked[name])}")
    q, k, v = (t.transpose(1, 2).flatten(0, 1).to(value.dtype) for t in (query, key, value))
    lengths = (cu_seq_lens_q, cu_seq_lens_q, max_length_q, max_length_q)
    window = (-1 if sliding_window is None else sliding_window - 1, 0)
    is_grouped = query.shape[1] != key.shape[1]  # if it isn't but says so, the backward pass may take another kernel
    output: Any = varlen_attn(q, k, v, *lengths, scale=scaling, window_size=window, enable_gqa=is_grouped)
    return output.unflatten(0, (query.shape[0], query.shape[2])), None
