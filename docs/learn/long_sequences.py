"""Long sequences by hand (Ulysses): processes divide the tokens of a sequence, and for attention its heads instead."""

from typing import Any

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, scaled_dot_product_attention
from torch.nn.utils import parameters_to_vector, vector_to_parameters

dist.init_process_group("gloo")
rank, p = dist.get_rank(), dist.get_world_size()
T, LAYERS, H, K, D = 1024, 2, 8, 4, 16  # tokens, layers, heads of queries, heads of keys and values, numbers per head
pixels = torch.tensor(load_digits().data).long().flatten()  # the digits as one text: each pixel is a token, 0 to 16
sent, kept = [0], {0: 0}  # in one step: the bytes of each all-to-all; of what backward needs, by address


class AllToAll(torch.autograd.Function):
    """The eighth collective: part i goes to process i; the parts that arrive are in the order of their senders."""

    @staticmethod
    def forward(ctx: Any, parts: Tensor) -> Tensor:
        sent.append(parts.nbytes * (p - 1) // p)  # a process keeps one part
        dist.all_to_all_single(arrived := torch.empty_like(parts), parts)
        return arrived

    @staticmethod
    def backward(ctx: Any, gradients: Tensor) -> Tensor:
        return AllToAll.apply(gradients.contiguous())  # each part's gradient goes back to the part's sender


def trade(x: Tensor, cut: int, join: int) -> Tensor:
    """Cut this dimension into a part for each process, and join the parts that arrive along another dimension."""
    return torch.cat(AllToAll.apply(torch.stack(x.chunk(c, cut))).unbind(), join) if c > 1 else x


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Sequential(nn.LayerNorm(H * D), nn.Linear(H * D, (H + 2 * K) * D))
        self.out = nn.Linear(H * D, H * D)
        self.mlp = nn.Sequential(nn.LayerNorm(H * D), nn.Linear(H * D, 256), nn.GELU(), nn.Linear(256, H * D))

    def forward(self, x: Tensor) -> Tensor:  # K groups: H / K heads of queries, and the head of keys and of values
        groups = trade(self.qkv(x).unflatten(1, (K, -1, D)), cut=1, join=0)  # all tokens of K / c groups
        q, k, v = (t.movedim(0, -2) for t in groups.split((H // K, 1, 1), 2))  # (groups, heads, tokens, D)
        seen = scaled_dot_product_attention(q, k.expand_as(q), v.expand_as(q), is_causal=True)
        x = x + self.out(trade(seen.movedim(-2, 0), cut=0, join=1).flatten(1))  # its own tokens of all groups
        return x + self.mlp(x)


def keep(saved: Tensor) -> Tensor:
    kept[saved.untyped_storage().data_ptr()] = saved.untyped_storage().nbytes()
    return saved


for c in (1, p):  # how many processes share a sequence
    torch.manual_seed(0)  # the same weights on all processes
    token, position = nn.Embedding(17, H * D), nn.Embedding(T, H * D)
    blocks = nn.Sequential(*(Block() for _ in range(LAYERS)), nn.LayerNorm(H * D), nn.Linear(H * D, 17))
    weights = list(nn.ModuleList([token, position, blocks]).parameters())
    vector_to_parameters(flat := parameters_to_vector(weights).detach(), weights)  # the weights are views of `flat`
    own, curve = torch.arange(T).chunk(c)[rank % c], []  # the places of its tokens in the whole sequence
    for text in pixels.unfold(0, T + 1, T)[:10]:  # the label of each token is the next one
        sent, kept = [], {}
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda saved: saved):
            logits = blocks(token(text[own]) + position(own))
            loss = cross_entropy(logits, text[own + 1], reduction="sum") / T  # its part of the mean over all tokens
        gradient = parameters_to_vector(torch.autograd.grad(loss, weights))
        for part in (loss.data, gradient) if c > 1 else ():
            dist.all_reduce(part)  # the sum over the processes
        curve.append((loss.item(), gradient))
        flat -= 0.2 * gradient
    held = sum(kept.values()) - flat.nbytes
    if rank == 0:
        print(f"c = {c}: loss {curve[0][0]:.4f} to {curve[-1][0]:.4f}, bytes: {held:10,} kept, {sum(sent):9,} sent")
    expected, whole = (curve, held) if c == 1 else (expected, whole)
    for (loss, gradient), (right, true) in zip(curve, expected, strict=True):
        assert abs(loss - right) <= 1e-5, f"loss {loss:.4f}, not {right:.4f}"
        assert (gradient - true).abs().max() <= 1e-5 * true.abs().max(), "gradient"
    assert sum(sent) == 2 * LAYERS * len(own) * 4 * 2 * D * (H + K) * (c - 1) // c
...
