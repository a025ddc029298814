"""How a language model computes attention where several documents share a row.

transformers' own way is a mask of shape (batch, 1, length, length), which each layer reads and keeps. torch's kernel
for documents of any length needs none. Both are here as functions of where documents end.
"""

import inspect
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
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
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    *,
    cu_seq_lens_q: Tensor,
    max_length_q: int,
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
    _require_known("varlen", {"dropout": dropout or None, "attention_mask": attention_mask, **options})
    q, k, v = (t.transpose(1, 2).flatten(0, 1).to(value.dtype) for t in (query, key, value))
    lengths = (cu_seq_lens_q, cu_seq_lens_q, max_length_q, max_length_q)
    window = (-1 if sliding_window is None else sliding_window - 1, 0)
    # if they aren't grouped but say so, the backward pass may take another kernel
    grouped: dict[str, Any] = {"enable_gqa": query.shape[1] != key.shape[1]} if HAS_GQA_SWITCH else {}
    output: Any = varlen_attn(q, k, v, *lengths, scale=scaling, window_size=window, **grouped)
    return output.unflatten(0, (query.shape[0], query.shape[2])), None


def attention_by_document(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    *,
    cu_seq_lens_q: Tensor,
    max_length_q: int,
    **options: Any,
) -> tuple[Tensor, None]:
    """Return what `varlen_attention` does, by the usual kernel, a document at a time: in any dtype, and with dropout.
    Only windows need a mask. On a GPU, the host waits for the lengths."""
    _require_known("per-document", {"attention_mask": attention_mask, **options})
    lengths = [length for length in cu_seq_lens_q.diff().tolist() if length]
    packed = (t.to(value.dtype).transpose(1, 2).flatten(0, 1).split(lengths) for t in (query, key, value))
    is_grouped = query.shape[1] != key.shape[1]
    outputs = []
    for document in zip(*packed, strict=True):
        q, k, v = (tensor.transpose(0, 1).unsqueeze(0) for tensor in document)
        mask, length = None, q.shape[2]
        if sliding_window is not None and sliding_window < length:
            mask = torch.ones(length, length, dtype=torch.bool, device=q.device).tril().triu(1 - sliding_window)
        output = F.scaled_dot_product_attention(
            q, k, v, mask, dropout, is_causal=mask is None, scale=scaling, enable_gqa=is_grouped
        )
        outputs.append(output.squeeze(0).transpose(0, 1))
    return torch.cat(outputs).unflatten(0, (query.shape[0], query.shape[2])), None


def attention_in_halves(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, *arguments: Any, **options: Any
) -> tuple[Tensor, None]:
    """Return what `attention_by_document` does, where two rows of the batch, one after the other, are the halves of a
    sequence. Rows don't see each other elsewhere in a model: what it computes is what two processes would, which have
    a half each."""
    whole = (tensor.unflatten(0, (-1, 2)).transpose(1, 2).flatten(2, 3) for tensor in (query, key, value))
    output, _ = attention_by_document(module, *whole, *arguments, **options)
    return output.unflatten(1, (2, -1)).flatten(0, 1), None


def _require_known(name: str, options: dict[str, Any]) -> None:
    """Raise a ValueError if attention of this name is asked for what it can't do."""
    asked = {option for option, value in options.items() if value is not None and value is not False}
    if unknown := sorted(asked - WITHOUT_EFFECT):
        raise ValueError(f"{name} attention has no {' and no '.join(unknown)}")


AttentionInterface.register("varlen", varlen_attention)  # without an AttentionMaskInterface no mask is made
AttentionInterface.register("in_halves", attention_in_halves)
