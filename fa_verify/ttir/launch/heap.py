"""Asks the C library to keep the memory that tiles leave behind for the tiles that follow.

By default glibc gives freed blocks of some hundred kilobytes back to the kernel, and every new tile
then faults its pages in again: half the time of a vector addition. Knows nothing of the executor.
"""

from __future__ import annotations

import ctypes
from functools import cache

# mallopt's parameters (glibc, malloc.h).
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_LARGEST_MMAP_THRESHOLD = 32 << 20  # glibc takes no more (HEAP_MAX_SIZE / 2)
_KEPT = 256 << 20  # bytes that may lie free at the end of the heap


@cache
def keep_freed_memory() -> None:
    """Tune malloc, once a process; elsewhere than on glibc nothing happens."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, _LARGEST_MMAP_THRESHOLD)
        mallopt(_M_TRIM_THRESHOLD, _KEPT)
