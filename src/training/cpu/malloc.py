"""Memory that was freed: kept by the process, which is faster, or given back, so that a sharded model needs no more
than its share."""

import ctypes
import sys

# parameters of mallopt, from glibc's malloc.h
M_TRIM_THRESHOLD, M_TOP_PAD, M_MMAP_THRESHOLD, M_MMAP_MAX = -1, -2, -3, -4

# large blocks come from the heap (no mmap), which grows by 64 MiB, and whose end is cut off only where 2 GiB are free
KEEP = {M_MMAP_MAX: 0, M_TRIM_THRESHOLD: 2**31 - 1, M_TOP_PAD: 64 * 2**20}
"""Keeps glibc from giving large blocks back to the kernel: otherwise each activation is made of new pages, which the
kernel zeroes first. PyTorch's allocator keeps memory on GPUs too."""
# from 1 MiB on; once set, the threshold stays: glibc's own grows with the blocks that are freed, up to 32 MiB
GIVE_BACK = {M_MMAP_THRESHOLD: 2**20}
"""Has glibc give each large block back to the kernel when it is freed. What FSDP gathers and frees, block by block,
would otherwise be scattered over the heap, which grows until it could hold the whole model several times."""


def mallopt(settings: dict[int, int]) -> bool:
    """Set these parameters. Return whether they could be: only glibc has them."""
    call = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    return call is not None and all(call(*setting) for setting in settings.items())
