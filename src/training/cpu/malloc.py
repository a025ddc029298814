"""Memory that was freed: kept by the process, which is faster, or given back, so that a sharded model needs no more
than its share."""

import ctypes
import sys

# parameters of mallopt, from glibc's malloc.h
M_TRIM_THRESHOLD, M_TOP_PAD, M_MMAP_THRESHOLD, M_MMAP_MAX = -1, -2, -3, -4
# bytes: the heap grows by 64 MiB at a time, and blocks from 1 MiB on are large
TOP_PAD, LARGE = 64 * 2**20, 2**20


def keep_freed_memory() -> bool:
    """Keep glibc from giving large blocks back to the kernel: otherwise each activation is made of new pages, which the
    kernel zeroes first. PyTorch's allocator keeps memory on GPUs too.

    Returns:
        Whether it could be set: only glibc has it.
    """
    # large blocks come from the heap (no mmap), whose end is cut off only where 2 GiB of it are free
    return _mallopt({M_MMAP_MAX: 0, M_TRIM_THRESHOLD: 2**31 - 1, M_TOP_PAD: TOP_PAD})


def return_freed_memory() -> bool:
    """Have glibc give each block from 1 MiB on back to the kernel when it is freed. What FSDP gathers and frees, block
    by block, would otherwise be scattered over the heap, which grows until it could hold the whole model several times.

    Returns:
        Whether it could be set: only glibc has it.
    """
    # once set, the threshold stays; glibc's own grows with the blocks that are freed, up to 32 MiB
    return _mallopt({M_MMAP_THRESHOLD: LARGE})


def _mallopt(settings: dict[int, int]) -> bool:
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    return mallopt is not None and all(mallopt(*setting) for setting in settings.items())
