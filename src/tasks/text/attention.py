"""How a language model computes attention where several documents share a row.

transformers' own way is a mask of shape (batch, 1, length, length), which each layer reads and keeps. torch's kernel
for documents of any length needs none.
"""

import inspect
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention.varlen import varlen_attn
from transformers import AttentionInterface

WITHOUT_EFFECT = {"cu_seq_lens_k", "max_length_k", "position_ids", "is_causal"}
"""Arguments of attention functions that do not change the attention of a decoder within a document."""

HAS_GQA_SWITCH = "enable_gqa" in inspect.signature(varlen_attn).parameters
"""torch 2.11 has none: its kernel takes fewer heads of keys and values as they are."""


def document_lengths(ends: list[int]) -> dict[str, Any]:
    """Return `cu_seq_lens`, where in the flattened batch each document begins and the last ends, of shape
    (documents + 1,), int32; and `max_length`, an int that none exceeds. `ends` is where each ends; padding is one too.

    A compiler would specialize on the longest length and on the number of documents: both are rounded up to a power of
    two, so that few of them occur. The documents that this adds have no tokens.
    """
    edges = torch.tensor([0, *ends], dtype=torch.int32)
    cu_seq_lens = torch.full((_power_of_two(len(ends)) + 1,), ends[-1], dtype=torch.int32)
    cu_seq_lens[: len(edges)] = edges
    return {"cu_seq_lens": cu_seq_lens, "max_length": _power_of_two(int(edges.diff().max()))}


def _power_of_two(least: int) -> int:
    return 1 << (least - 1).bit_length()


def varlen_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: None,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
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
    asked = {"dropout": dropout or None, **options}
    unknown = [
        n for n, option in asked.items() if n not in WITHOUT_EFFECT and option is not None and option is not False
    ]
    if unknown:
        raise ValueError(f"varlen attention has no {' and no '.join(unknown)}")
    q, k, v = (t.transpose(1, 2).flatten(0, 1).to(value.dtype) for t in (query, key, value))
    lengths = (cu_seq_lens_q, cu_seq_lens_q, max_length_q, max_length_q)
    window = (-1 if sliding_window is None else sliding_window - 1, 0)
    # if they aren't grouped but say so, the backward pass may take another kernel
    grouped: dict[str, Any] = {"enable_gqa": query.shape[1] != key.shape[1]} if HAS_GQA_SWITCH else {}
    output: Any = varlen_attn(q, k, v, *lengths, scale=scaling, window_size=window, **grouped)
    return output.unflatten(0, (query.shape[0], query.shape[2])), None


AttentionInterface.register("varlen", varlen_attention)  # without an AttentionMaskInterface no mask is made
