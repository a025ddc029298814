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
    attention: Callable[..., Any],
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *arguments: Any,
    **options: Any,
) -> tuple[Tensor, None]:
    """Return the attention of this process's part of each sequence to the whole sequence, as `attention`, a function
    for transformers' AttentionInterface, computes it. Collective.

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
    output, _ = attention(module, *(_trade(tensor, cp) for tensor in tensors), *arguments, **options)
    return _trade(output, cp)[:, :, :heads], None


def _trade(tensor: Tensor, cp: ContextParallel) -> Tensor:
    """Split a tensor along its second dimension, send part i to process i of the group, and join what each process sent
    along the third."""
    parts = tensor.unflatten(1, (cp.size, -1)).movedim(1, 0).contiguous()
    return torch.cat([*collectives.all_to_all_single_autograd(parts, None, None, cp.group)], 2)
