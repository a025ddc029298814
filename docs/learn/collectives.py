"""The seven collectives, each on four numbers per process, and the ring they are built from.

torchrun --standalone --nproc-per-node=4 docs/learn/collectives.py
"""

import course  # prints that the processes start and, in a line, which assertion fails
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

dist.init_process_group("gloo", timeout=timedelta(minutes=2))  # "nccl" on GPUs; torchrun says where the others are
rank, p = dist.get_rank(), dist.get_world_size()  # which process this is, and of how many
assert p == 4, "start four processes: --nproc-per-node=4"
SENT = {"N": 1.0, "(p-1)/p N": (p - 1) / p, "2 (p-1)/p N": 2 * (p - 1) / p}  # bytes sent by one process in a ring, / N


def show(name: str, formula: str, whole: int, use: str, after: Tensor | None, expected: list[list[int] | None]) -> None:
    """Check what each process has afterwards, and print it. None means nothing, or undefined contents."""
    found: list[list[int] | None] = [None] * p
    dist.all_gather_object(found, None if after is None else after.int().tolist())  # an all-gather of arbitrary objects
    assert found == expected, f"{name}: {found}"
    if rank == 0:
        print(f"\n{name:16}{formula} = {SENT[formula] * whole:.0f} bytes, N = {whole}".ljust(52), use)
        for r, numbers in enumerate(found):
            old, new = ("".join(f"{x:4}" for x in row) for row in (range(10 * r, 10 * r + 4), numbers or []))
            print(f"  rank {r}  {old}  ->{new or '   -'}")


def ring_all_reduce(numbers: Tensor) -> tuple[Tensor, int]:
    """Return the sums and the bytes sent: each part takes p-1 hops to accumulate its sum, then p-1 to reach all."""
    parts, sent = list(numbers.chunk(p)), 0
    for hop in range(2 * (p - 1)):
        out, into = (rank - hop) % p, (rank - hop - 1) % p
        arriving = torch.empty_like(parts[into])
        pair = [dist.P2POp(dist.isend, parts[out], (rank + 1) % p), dist.P2POp(dist.irecv, arriving, (rank - 1) % p)]
        for request in dist.batch_isend_irecv(pair):  # both at once, so that neighbours don't wait for each other
            request.wait()
        parts[into] = parts[into] + arriving if hop < p - 1 else arriving
        sent += parts[out].nbytes
    return torch.cat(parts), sent


before = 10.0 * rank + torch.arange(4.0)  # 0 1 2 3 on rank 0, 10 11 12 13 on rank 1, and so on
everything, sums = [10 * r + i for r in range(p) for i in range(4)], [60, 64, 68, 72]
N = before.nbytes  # 16: four numbers of four bytes

after = before.clone()
dist.broadcast(after, src=0)  # rank 0 sends its numbers to every rank
show("broadcast", "N", N, "the weights, before the first step", after, [[0, 1, 2, 3]] * p)

after = torch.empty(1)
dist.scatter(after, list(before.chunk(p)) if rank == 0 else None, src=0)  # rank 0 sends a part to each rank
show("scatter", "(p-1)/p N", N, "data that one process reads", after, [[0], [1], [2], [3]])

after = torch.empty(4 * p)
dist.gather(before, list(after.chunk(p)) if rank == 0 else None, dst=0)  # rank 0 gets everyone's numbers
show("gather", "(p-1)/p N", 4 * N, "predictions", after if rank == 0 else None, [everything, None, None, None])

dist.all_gather(list(after.chunk(p)), before)  # every rank gets everyone's numbers
show("all-gather", "(p-1)/p N", 4 * N, "FSDP's weights, before use", after, [everything] * p)

after = before.clone()
dist.reduce(after, dst=0)  # rank 0 gets the sums over the ranks
show("reduce", "N", N, "gradients, for one that updates", after if rank == 0 else None, [sums, None, None, None])

after = before.clone()
dist.all_reduce(after)  # every rank gets the sums
show("all-reduce", "2 (p-1)/p N", N, "DDP's gradients", after, [sums] * p)

after = torch.empty(1)
dist.reduce_scatter(after, list(before.chunk(p)))  # each rank gets the sums of its part
show("reduce-scatter", "(p-1)/p N", N, "FSDP's gradients", after, [[x] for x in sums])

total, sent = ring_all_reduce(before)
assert sent == SENT["2 (p-1)/p N"] * N, f"a ring by hand: {sent} bytes"
show("a ring by hand", "2 (p-1)/p N", N, "what all-reduce does", total, [sums] * p)

dist.barrier()  # or a process could exit while another still needs it
dist.destroy_process_group()
