"""Long sequences by hand (Ulysses): processes divide the tokens of a sequence, and for attention its heads instead."""

import course  # prints that the processes start and, in a line, which assertion fails
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
sent, kept = [0], {0: 0}  # in a step: the bytes of each all-to-all; the bytes that backward needs, by their address


class AllToAll(torch.autograd.Function):  # part i goes to process i; parts arrive in the order of their senders
    @staticmethod
    def forward(ctx: object, parts: Tensor) -> Tensor:
        sent.append(parts.nbytes * (p - 1) // p)  # a process keeps one part
        dist.all_to_all_single(arrived := torch.empty_like(parts), parts)
        return arrived

    @staticmethod
    def backward(ctx: object, gradients: Tensor) -> Tensor:
        return AllToAll.apply(gradients.contiguous())  # each part's gradient goes back to the part's sender


def trade(x: Tensor, cut: int, join: int) -> Tensor:
    """Cut this dimension into a part for each process, and join the parts that arrive along the other dimension."""
    return torch.cat(AllToAll.apply(torch.stack(x.chunk(c, cut))).unbind(), join) if c > 1 else x


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(H * D), nn.Linear(H * D, (H + 2 * K) * D), nn.Linear(H * D, H * D)
        self.mlp = nn.Sequential(nn.LayerNorm(H * D), nn.Linear(H * D, 256), nn.GELU(), nn.Linear(256, H * D))

    def forward(self, x: Tensor) -> Tensor:  # K groups: H / K heads of queries, and the keys and values that they read
        groups = trade(self.qkv(self.norm(x)).unflatten(1, (K, -1, D)), cut=1, join=0)  # K / c groups of all tokens
        q, k, v = (t.movedim(0, -2) for t in groups.split((H // K, 1, 1), 2))  # (groups, heads, tokens, numbers)
        seen = scaled_dot_product_attention(q, k.expand_as(q), v.expand_as(q), is_causal=True).movedim(-2, 0)
        x = x + self.out(trade(seen, cut=0, join=1).flatten(1))  # all groups of T / c tokens
        return x + self.mlp(x)


def keep(saved: Tensor) -> Tensor:
    kept[saved.untyped_storage().data_ptr()] = saved.untyped_storage().nbytes()
    return saved


numbers = 10 * rank + torch.arange(p)  # say, 12: what the tokens of rank 1 have in the heads of rank 2
lines, truth = [""] * p, dict[int, Tensor]()  # what is printed; the loss and gradient of each step on one process
dist.all_gather_object(lines, f"rank {rank}   {numbers.tolist()!s:16}   ->   {AllToAll.apply(numbers).tolist()}")
for c in (1, p):  # processes share a sequence
    torch.manual_seed(0)  # the same weights on all processes
    token, position = nn.Embedding(17, H * D), nn.Embedding(T, H * D)
    blocks = nn.Sequential(*(Block() for _ in range(LAYERS)), nn.LayerNorm(H * D), nn.Linear(H * D, 17))
    weights = list(nn.ModuleList([token, position, blocks]).parameters())
    vector_to_parameters(flat := parameters_to_vector(weights).detach(), weights)  # the weights are views of `flat`
    own = torch.arange(T // c) + rank % c * (T // c)  # the places of this process's tokens in the whole sequence
    for step, text in enumerate(pixels.unfold(0, T + 1, T)[:10]):
        sent, kept = [], {}
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda saved: saved):
            logits = blocks(token(text[own]) + position(own))
            loss = cross_entropy(logits, text[own + 1], reduction="sum") / T  # its part of the mean over all tokens
        found = torch.cat([loss.detach()[None], parameters_to_vector(torch.autograd.grad(loss, weights))])
        if c > 1:
            dist.all_reduce(found)  # the sums over the processes
        flat -= 0.2 * found[1:]
        right = truth.setdefault(step, found)
        assert (found - right).abs().max() <= 1e-5, f"step {step + 1}: {found[0]:.4f}, not {right[0]:.4f}"
    assert sum(sent) == 2 * LAYERS * len(own) * 8 * D * (H + K) * (c - 1) // c, sent
    held = sum(kept.values()) - flat.nbytes  # without the weights
    lines.append(f"c = {c}   {len(own):5,} tokens   loss {found[0]:.4f}   bytes: {held:10,} kept {sum(sent):9,} sent")
if rank == 0:
    print(*lines, sep="\n")
dist.barrier()
dist.destroy_process_group()
