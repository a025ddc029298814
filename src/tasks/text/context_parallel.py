"""Context parallelism: several processes split each sequence (`cp_size` in the accelerate yaml).

Each process of a group has a part of each sequence. Only attention needs other tokens: before it, an all-to-all trades
all heads of a part of the sequence for some heads of the whole, and after it, another one trades back. So attention
sees whole documents, packed or not, and computes what it would on one process; and all processes have the same amount
of work, however long the documents are.

Source: Jacobs et al. 2023, "DeepSpeed Ulysses", https://arxiv.org/abs/2309.14509.
"""

import math
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.distributed import _functional_collectives as collectives
from torch.nn import functional as F
from transformers import AttentionInterface, PreTrainedConfig

from src.config.errors import UserError
from src.tasks.base import ContextParallel
from src.tasks.text.attention import document_attention
from src.tasks.text.packing import Chunk
from src.tasks.text.rows import Batch
from src.tasks.text.sequences import PackedSequences
from src.tasks.text.trial import unsupported_reason


class LongSequences(PackedSequences):
    """Splits sequences that several processes share."""

    splits_sequences: ClassVar[bool] = True

    def choose_attention(self) -> str:
        attention, cp = super().choose_attention(), self.state.cp
        if cp.size == 1:
            return attention
        require_splittable(self._config, self.packing)
        self.state.optimizations[-1] += f", across {cp.size} processes"
        return register(attention, cp)

    def batch_of(self, samples: list[list[Chunk]], width: int) -> Batch:
        batch, cp = super().batch_of(samples, width), self.state.cp
        return shard_batch(batch, cp) if cp.size > 1 else batch


def require_splittable(config: PreTrainedConfig, packing: bool) -> None:
    """Raise a UserError if processes can't split the sequences of such models, because these mix tokens outside of
    their attention, or attend in a way that attention by document can't."""
    if reason := unsupported_reason(config, "by_document", packing):
        raise UserError(f"{config.model_type}: processes cannot split its sequences (cp_size): {reason}")


def shard_batch(batch: Batch, cp: ContextParallel) -> Batch:
    """Return this process's part of a batch of whole sequences, from PackedSequences.batch_of, and which targets are in
    it: `own_targets`, shape (targets,), bool.

    Labels have been shifted there: the label of a part's last token is the first token of the next part.

    Args:
        batch: a batch whose rows divide into `cp.size` parts.
    """
    inputs, index = batch["inputs"], batch["inputs"]["index"]
    width = inputs["input_ids"].shape[1]
    length = width // cp.size
    start = cp.rank * length
    is_own = index % width // length == cp.rank
    own = {
        **{name: inputs[name][:, start : start + length].contiguous() for name in ("input_ids", "position_ids")},
        "index": (index // width * length + index % length)[is_own],
        "targets": inputs["targets"][is_own],
    }
    return {
        "inputs": inputs | own,
        "tokens": sum(min(max(size - start, 0), length) for size in batch["sizes"]),
        "pairs": batch["pairs"] / cp.size,  # per head, and each process has the same number of heads
        "own_targets": is_own,
    }


def register(attention: str, cp: ContextParallel) -> str:
    """Register this attention, sdpa or varlen, with transformers, across the processes of a group. Return its name
    there."""
    AttentionInterface.register("context_parallel", partial(ulysses_attention, cp, is_varlen=attention == "varlen"))
    return "context_parallel"


def ulysses_attention(
    cp: ContextParallel, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, *arguments: Any, **options: Any
) -> tuple[Tensor, None]:
    """Return the attention of this process's part of each sequence to the whole sequence. Collective.

    Arguments are those of `document_attention`, except that `query`, `key` and `value` have the length of a part.
    """
    heads, keys = query.shape[1], key.shape[1]
    # Each process computes the same number of heads, and needs the heads of keys and values that they attend to. If
    # there are fewer of these than processes, each is sent to several processes. If the heads don't divide evenly,
    # heads of zeros fill up, and their output is dropped.
    copies = math.lcm(keys, cp.size) // keys if heads % cp.size == 0 else heads // keys
    tensors = [query, *(tensor.repeat_interleave(copies, 1) for tensor in (key, value))]
    # under autocast, rotary embeddings may have turned queries and keys into fp32, twice the bytes
    tensors = [F.pad(t.to(value.dtype).transpose(1, 2), (0, 0, 0, -t.shape[1] % cp.size)) for t in tensors]
    # shape (batch, length of a part, processes, heads per process, head size); values may have another head size
    cut = [tensor.unflatten(2, (cp.size, -1)) for tensor in tensors]
    received = _all_to_all(torch.cat([tensor.flatten(3) for tensor in cut], -1).movedim(2, 0), cp)
    sizes = [tensor.shape[3:] for tensor in cut]
    joined = torch.cat([*received], 1).split([size.numel() for size in sizes], -1)
    whole = (part.unflatten(-1, size).transpose(1, 2) for part, size in zip(joined, sizes, strict=True))
    output, _ = document_attention(module, *whole, *arguments, **options)
    parts = _all_to_all(output.unflatten(1, (cp.size, -1)).movedim(1, 0), cp)
    return torch.cat([*parts], 2)[:, :, :heads], None


def _all_to_all(parts: Tensor, cp: ContextParallel) -> Tensor:
    """Send part i, along the first dimension, to process i of the group. Return what each process sent."""
    return collectives.all_to_all_single_autograd(parts.contiguous(), None, None, cp.group)
