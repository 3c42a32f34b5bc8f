"""Zeros that take up no memory until somebody writes there, however many there are."""

from __future__ import annotations

import mmap
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from fa_verify.ttir.numbers.floats import Array

# Linux grants no more than there is memory, unless asked not to set any aside (mmap(2)), and counts
# private pages against a process's limit on data, touched or not (RLIMIT_DATA, setrlimit(2)).
_NORESERVE = getattr(mmap, "MAP_NORESERVE", 0x4000)
_LARGE = 1 << 28  # bytes; below, NumPy's own zeros are fresh pages too


def zeros(size: int, dtype: Any) -> Array:
    """A one-dimensional array of zeros."""
    nbytes = size * np.dtype(dtype).itemsize
    if nbytes < _LARGE:
        return np.zeros(size, dtype)
    pages = mmap.mmap(-1, nbytes, flags=mmap.MAP_SHARED | mmap.MAP_ANONYMOUS | _NORESERVE)
    return np.frombuffer(pages, dtype)
