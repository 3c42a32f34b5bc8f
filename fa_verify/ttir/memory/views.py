"""Which offsets inside a strided view are its elements. Knows shapes and strides only."""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np
from numpy.lib.stride_tricks import as_strided

if TYPE_CHECKING:
    import torch

    from fa_verify.ttir.numbers.floats import Array

# Spans past this many elements get no table: 16 MiB a view, and longer to fill than to compute.
_TABLE = 1 << 22


def span_of(tensor: torch.Tensor) -> int:
    """Elements from the first to the last element of `tensor`, both counted."""
    if tensor.numel() == 0:
        return 0
    pairs = zip(tensor.shape, tensor.stride(), strict=True)
    return 1 + sum((size - 1) * stride for size, stride in pairs)


def coordinates(
    sizes: tuple[int, ...], strides: tuple[int, ...], offset: int
) -> tuple[int, ...] | None:
    """Index of the element at `offset`; indices may exceed extents when it lies outside."""
    if offset < 0 or not sizes:
        return None
    index = [0] * len(sizes)
    rest = offset
    for dim in sorted(range(len(sizes)), key=lambda d: -strides[d]):
        if strides[dim] > 0 and sizes[dim] > 1:
            index[dim], rest = divmod(rest, strides[dim])
    return tuple(index) if rest == 0 else None


class Nested:
    """`legal_runs` computed offset by offset, for spans too large for a table."""

    def __init__(self, dims: list[tuple[int, int]], span: int) -> None:
        """Take (stride, size) pairs, ascending, each stride past all that the smaller ones span."""
        self._dims, self._span = dims, span

    def take(self, index: Array, mode: str) -> Array:
        """Length of the run of legal elements at each offset; as `take` of an array."""
        del mode  # always "clip"
        rest: Array = np.clip(index, 0, self._span - 1)
        legal = np.ones(rest.shape, np.bool_)
        for stride, size in self._dims[:0:-1]:
            at, rest = np.divmod(rest, stride)
            legal &= at < size
        stride, size = self._dims[0]
        at, rest = np.divmod(rest, stride)
        length = size - at if stride == 1 else 1
        return np.where(legal & (rest == 0) & (at < size), length, 0)


@lru_cache(maxsize=256)
def legal_runs(sizes: tuple[int, ...], strides: tuple[int, ...]) -> Array | Nested | None:
    """Length of the run of legal elements that starts at each offset of a view's span.

    Returns None when every offset inside the span is an element (the common, dense case).
    """
    dims: list[tuple[int, int]] = []
    for stride, size in sorted(
        (st, sz) for sz, st in zip(sizes, strides, strict=True) if sz > 1 and st > 0
    ):
        if dims and stride == dims[-1][0] * dims[-1][1]:
            dims[-1] = (dims[-1][0], dims[-1][1] * size)  # the two are one longer dimension
        else:
            dims.append((stride, size))
    if not dims or (len(dims) == 1 and dims[0][0] == 1):
        return None
    reach = [sum((sz - 1) * st for st, sz in dims[:i]) for i in range(len(dims) + 1)]
    span = 1 + reach[-1]
    if span > _TABLE and all(stride > r for (stride, _), r in zip(dims, reach, strict=False)):
        return Nested(dims, span)
    legal = np.zeros(span, np.bool_)
    as_strided(legal, tuple(s for _, s in dims), tuple(s for s, _ in dims))[...] = True
    starts = np.flatnonzero(np.diff(legal.astype(np.int8), prepend=0) == 1)
    ends = np.flatnonzero(np.diff(legal.astype(np.int8), append=0) == -1) + 1
    runs = np.zeros(span, np.int32)
    runs[legal] = np.repeat(ends, ends - starts) - np.flatnonzero(legal)
    return None if legal.all() else runs
