"""Sums and products of 16-bit tiles along an axis: halves combined with halves, rounded each time.

The order and the roundings are those of `ops.reductions` for any combine region; here each level is
one call of torch, in memory that all trees share.
"""

from __future__ import annotations

from functools import lru_cache, partial
from math import gcd, prod
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from fa_verify.ttir.numbers.shorts import as_tensor

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

    from fa_verify.ttir.numbers.floats import Array

# Rows that are added in parts of so few elements cost more than turned ones: 2048 rows of twice 16
# elements take 68 us, of twice 32 10 us; turning 2048 rows of 32 takes 4 us.
_SHORT = 16
# Neighbours that are turned as one, by the length of a row; the fewer the slower.
_WORDS: dict[int, Any] = {
    32: np.complex128,
    16: np.complex128,
    8: np.int64,
    4: np.int16,
    2: np.int16,
}
# Elements that are turned at a time, half of a first-level cache, as they are read once for each
# column: 2048 rows of 32 take 3.6 us so, 6.1 us at once. In fewer rows additions are slow again.
_TOGETHER, _ROWS = 8192, 2 * _SHORT
# Where the levels of all trees lie, so that they stay in cache: in memory of its own each of the 17
# sums of a kernel took 74 us, not 59. There is room for a wave (`engine.program`) of 2^21 elements.
_SCRATCH = np.empty(3 << 20, np.int16)


@lru_cache(maxsize=64)
def tree(
    function: Callable[..., torch.Tensor], shape: tuple[int, ...], axis: int, dtype: np.dtype[Any]
) -> Tree:
    """The tree for tiles of one shape, made at most once."""
    return Tree(function, shape, axis, dtype)


class Tree:
    """A reduction by `function(a, b, out=...)`, which rounds to the type of its operands."""

    def __init__(
        self,
        function: Callable[..., torch.Tensor],
        shape: tuple[int, ...],
        axis: int,
        dtype: np.dtype[Any],
    ) -> None:
        """`axis` has an extent that is a power of two above 1."""
        self.function, self.dtype = function, dtype
        before, length, after = shape[:axis], shape[axis], shape[axis + 1 :]
        size = prod(shape)
        memory = _SCRATCH if 3 * size <= 2 * _SCRATCH.size else np.empty(size + size // 2, np.int16)
        self._memory = [memory[:size].view(dtype), memory[size:].view(dtype)]
        self._first: Callable[[Array], object]  # takes the argument
        self._steps: list[Callable[[], object]] = []
        tile: Array | None = None  # where the last step left it; None: in the argument
        while length > (1 if after else 2 * _SHORT):
            length //= 2
            tile = self._fold(tile, axis, (*before, length, *after))
        rows = prod(before)
        together = gcd(rows, _TOGETHER // length)
        groups = (rows // together, together) if together >= _ROWS else (1, rows)
        while length > 1:
            tile = self._turn(tile, (*groups, length))
            while tile.shape[1] > 1:
                tile = self._fold(tile, 1, (groups[0], tile.shape[1] // 2, tile.shape[2]))
            length = tile.shape[2] // groups[1]
        self._result = cast("Array", tile).reshape(before + after)

    def __call__(self, x: Array) -> Array:
        """A short array without its axis."""
        self._first(x)
        for step in self._steps:
            step()
        return self._result.copy()

    def _place(self, *shape: int) -> Array:
        """Memory that the last step did not write."""
        memory = self._memory[0]
        self._memory.reverse()
        return memory[: prod(shape)].reshape(shape)

    def _fold(self, tile: Array | None, axis: int, shape: tuple[int, ...]) -> Array:
        """One half with the other, into `shape`."""
        function, target, whole = self.function, self._place(*shape), (slice(None),) * axis
        out = as_tensor(target)
        left, right = (*whole, slice(shape[axis])), (*whole, slice(shape[axis], None))
        if tile is None:
            self._first = lambda x: function(as_tensor(x[left]), as_tensor(x[right]), out=out)
        else:
            a, b = as_tensor(tile[left]), as_tensor(tile[right])
            self._steps.append(partial(function, a, b, out=out))
        return target

    def _turn(self, tile: Array | None, shape: tuple[int, int, int]) -> Array:
        """Rows as columns in each group of them; what makes a word stays together."""
        groups, rows, length = shape
        word = np.dtype(_WORDS[length])
        columns = length * self.dtype.itemsize // word.itemsize
        target = self._place(groups, columns, rows * length // columns)
        moved = target.view(np.int16).view(word)

        def turned(x: Array) -> Array:
            words: Array = x.reshape(shape).view(np.int16).view(word)
            return words.transpose(0, 2, 1)

        if tile is None:
            self._first = lambda x: np.copyto(moved, turned(np.ascontiguousarray(x)))
        else:
            self._steps.append(partial(np.copyto, moved, turned(tile)))
        return target
