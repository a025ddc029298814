"""Memory that was freed stays with the process."""

import ctypes
import sys

M_TRIM_THRESHOLD, M_TOP_PAD, M_MMAP_MAX = -1, -2, -4  # of glibc's malloc.h
TOP_PAD = 64 * 2**20


def keep_freed_memory() -> bool:
    """Keep glibc from giving large blocks back to the kernel: otherwise each activation is made of new pages, which the
    kernel zeroes first. That was a third of a step of the MNIST CNN. PyTorch does the same on GPUs.

    Returns:
        Whether it could be set: only glibc has it.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    settings = {M_MMAP_MAX: 0, M_TRIM_THRESHOLD: 2**31 - 1, M_TOP_PAD: TOP_PAD}
    return mallopt is not None and all(mallopt(*setting) for setting in settings.items())
