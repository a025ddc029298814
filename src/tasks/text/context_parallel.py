"""Context parallelism: several processes split each sequence (`cp_size` in the accelerate yaml).

Each process of a group has a part of each sequence. Only attention needs other tokens: before it, an all-to-all trades
all heads of a part of the sequence for some heads of the whole, and after it, another one trades back. So attention
sees whole documents, packed or not, and computes what it would on one process; and all processes have the same amount
of work, however long the documents are.

Source: Jacobs et al. 2023, "DeepSpeed Ulysses", https://arxiv.org/abs/2309.14509.
"""

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import _functional_collectives as collectives
from torch.nn import functional as F
from transformers import AttentionInterface

from src.tasks.base import ContextParallel
from src.tasks.text.loss import attention_by_document, varlen_attention
from src.tasks.text.packing import Batch

Attention = Callable[..., tuple[Tensor, None]]
"""A function for transformers' AttentionInterface, such as `varlen_attention`."""


def shard_batch(batch: Batch, sizes: list[int], cp: ContextParallel) -> Batch:
    """Return this process's part of a batch of whole sequences, from CausalLM.collate, and which targets are in it:
    `own_targets`, shape (targets,), bool.

    Labels have been shifted there: the label of a part's last token is the first token of the next part.

    Args:
        batch: a batch whose rows divide into `cp.size` parts.
        sizes: the tokens of each row, without padding.
    """
    inputs, index = batch["inputs"], batch["inputs"]["index"]
    width = inputs["input_ids"].shape[1]
    length = width // cp.size
    start = cp.rank * length
    rows, places = index // width, index % width
    is_own = places // length == cp.rank
    own = {
        **{name: inputs[name][:, start : start + length].contiguous() for name in ("input_ids", "position_ids")},
        "index": (rows * length + places - start)[is_own],
        "targets": inputs["targets"][is_own],
    }
    return {
        "inputs": inputs | own,
        "tokens": sum(min(max(size - start, 0), length) for size in sizes),
        "pairs": batch["pairs"] / cp.size,  # per head, and each process has the same number of heads
        "own_targets": is_own,
    }


def register(attention: str, cp: ContextParallel) -> str:
    """Register this attention, sdpa or varlen, with transformers, across the processes of a group. Return its name
    there."""
    AttentionInterface.register(
        "context_parallel", partial(across, cp, varlen_attention if attention == "varlen" else attention_by_document)
    )
    return "context_parallel"


def across(
    cp: ContextParallel,
    attention: Attention,
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *arguments: Any,
    **options: Any,
) -> tuple[Tensor, None]:
    """Return the attention of this process's part of each sequence to the whole sequence. Collective.

    `query`, `key` and `value` have the shapes that `attention` takes, except for the length, which is that of a part.
    """
    heads = query.shape[1]
    # Each process computes the same number of heads, and needs the heads of keys and values that they attend to. If
    # there are fewer of these than processes, each is sent to several processes. If the heads don't divide evenly,
    # heads of zeros fill up, and their output is dropped.
    copies = math.lcm(key.shape[1], cp.size) // key.shape[1] if heads % cp.size == 0 else heads // key.shape[1]
    # under autocast, rotary embeddings may have turned queries and keys into fp32, twice the bytes
    tensors = [query.to(value.dtype), *(t.to(value.dtype).repeat_interleave(copies, 1) for t in (key, value))]
    tensors = [F.pad(tensor, (0, 0, 0, 0, 0, -tensor.shape[1] % cp.size)) for tensor in tensors]
    # shape (processes, batch, length of a part, heads per process, head size); values may have another head size
    cut = [tensor.unflatten(1, (cp.size, -1)).permute(1, 0, 3, 2, 4) for tensor in tensors]
    received = _all_to_all(torch.cat([tensor.flatten(3) for tensor in cut], -1), cp)
    joined = torch.cat([*received], 1).split([tensor.shape[3:].numel() for tensor in cut], -1)
    whole = (part.unflatten(-1, tensor.shape[3:]).transpose(1, 2) for part, tensor in zip(joined, cut, strict=True))
    output, _ = attention(module, *whole, *arguments, **options)
    parts = _all_to_all(output.unflatten(1, (cp.size, -1)).movedim(1, 0), cp)
    return torch.cat([*parts], 2)[:, :, :heads], None


def _all_to_all(parts: Tensor, cp: ContextParallel) -> Tensor:
    """Send part i, along the first dimension, to process i of the group. Return what each process sent."""
    return collectives.all_to_all_single_autograd(parts.contiguous(), None, None, cp.group)
