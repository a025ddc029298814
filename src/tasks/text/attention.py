"""Attention that keeps packed documents apart.

transformers itself uses a mask of shape (batch, 1, length, length), which each layer reads and keeps. torch's kernel
for documents of any length needs none. The attention functions here take the ends of documents instead.
"""

import inspect
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention.varlen import varlen_attn
from transformers import AttentionInterface

IGNORED_KWARGS = {"position_ids", "is_causal"}
"""Arguments of attention functions that do not change a decoder's attention within a document."""

HAS_GQA_SWITCH = "enable_gqa" in inspect.signature(varlen_attn).parameters
"""torch 2.11 has no such switch: its kernel takes fewer heads of keys and values without it."""


def document_lengths(ends: list[int]) -> dict[str, Any]:
    """Return `cu_seq_lens_q`, where in the flattened batch each document begins and the last one ends, of shape
    (documents + 1,), int32; and `max_length_q`, an int that no document exceeds. `ends` is where each one ends, padding
    being a document too.

    A compiler would specialize on the longest length and on the number of documents: both are rounded up to a power of
    two, so that they take few values. The documents that this adds have no tokens.
    """
    added = _power_of_two(len(ends)) - len(ends)
    cu_seq_lens = torch.tensor([0, *ends, *[ends[-1]] * added], dtype=torch.int32)
    return {"cu_seq_lens_q": cu_seq_lens, "max_length_q": _power_of_two(int(cu_seq_lens.diff().max()))}


def _power_of_two(least: int) -> int:
    return 1 << (least - 1).bit_length()


def document_attention(
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
    is_varlen: bool,
    **options: Any,
) -> tuple[Tensor, None]:
    """Return each token's attention to itself and to those before it in its document, for AttentionInterface.

    Args:
        query: shape (batch, heads, length, head size). `key` and `value` may have fewer heads.
        sliding_window: the maximum number of tokens that a token attends to, itself included; None: all.
        cu_seq_lens_q, max_length_q: as from `document_lengths`.
        is_varlen: use torch's varlen kernel, on all documents at once; otherwise the usual one, on one document at a
            time, in any dtype and with dropout. Then only sliding windows need a mask, and on a GPU the host waits for
            the lengths.

    Returns:
        Shape (batch, length, heads, head size), in the dtype of `value`: under autocast, rotary embeddings may have
        turned the others into fp32.

    Raises:
        ValueError: the model asks for more than the kernel can do.
    """
    options |= {"attention_mask": attention_mask, "dropout": is_varlen and dropout}
    asked = {name for name, option in options.items() if isinstance(option, Tensor) or option}
    if unknown := sorted(asked - IGNORED_KWARGS):
        raise ValueError(
            f"{'varlen' if is_varlen else 'per-document'} attention does not support {' and '.join(unknown)}"
        )
    q, k, v = (t.transpose(1, 2).flatten(0, 1).to(value.dtype) for t in (query, key, value))
    # claiming groups where there are none may select another kernel for the backward pass
    grouped: dict[str, Any] = {"enable_gqa": query.shape[1] != key.shape[1]}
    if is_varlen:
        lengths = cu_seq_lens_q, cu_seq_lens_q, max_length_q, max_length_q
        window = (sliding_window or 0) - 1, 0  # tokens before and after; -1: all
        grouped = grouped if HAS_GQA_SWITCH else {}
        output: Any = varlen_attn(q, k, v, *lengths, scale=scaling, window_size=window, **grouped)
    else:
        sizes, outputs = [size for size in cu_seq_lens_q.diff().tolist() if size], []
        parts = (t.transpose(0, 1)[None].split(sizes, 2) for t in (q, k, v))
        for size, *document in zip(sizes, *parts, strict=True):
            mask = None
            if sliding_window is not None and sliding_window < size:
                mask = torch.ones(size, size, dtype=torch.bool, device=q.device).tril().triu(1 - sliding_window)
            options = {"attn_mask": mask, "dropout_p": dropout, "is_causal": mask is None, "scale": scaling, **grouped}
            outputs.append(F.scaled_dot_product_attention(*document, **options)[0].transpose(0, 1))
        output = torch.cat(outputs)
    return output.unflatten(0, (query.shape[0], query.shape[2])), None


# without an AttentionMaskInterface no mask is made
AttentionInterface.register("varlen", partial(document_attention, is_varlen=True))
AttentionInterface.register("by_document", partial(document_attention, is_varlen=False))
