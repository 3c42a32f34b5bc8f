"""Sums and products of 16-bit tiles along an axis: halves combined with halves, rounded each time.

The order and the roundings are those of `ops.reductions` for any combine region; here each level is
one call of torch, into memory that is kept for the next tile of the same shape.
"""

from __future__ import annotations

from functools import partial
from math import prod
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from fa_verify.ttir.numbers.shorts import as_tensor

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

    from fa_verify.ttir.numbers.floats import Array

# Rows that are added in parts of so few elements cost more than turned ones: 2048 rows of twice 16
# elements take 68 us, of twice 32 10 us; turning 2048 rows of 32 takes 7 us.
_SHORT = 16
# Neighbours that are turned as one, by the length of a row; the fewer the slower.
_WORDS: dict[int, Any] = {
    32: np.complex128,
    16: np.complex128,
    8: np.int64,
    4: np.int16,
    2: np.int16,
}


class Tree:
    """A reduction by `function(a, b, out=...)`, which rounds to the type of its operands."""

    def __init__(self, function: Callable[..., torch.Tensor], axis: int) -> None:
        """`axis` has an extent that is a power of two above 1."""
        self.function = function
        self.axis = axis
        self.plan: _Plan | None = None

    def __call__(self, x: Array) -> Array:
        """A short array without its axis."""
        plan = self.plan
        if plan is None or plan.shape != x.shape or plan.dtype is not x.dtype:
            plan = self.plan = _Plan(self.function, x, self.axis)
        return plan.run(x)


class _Plan:
    """The steps for tiles of one shape; their results lie in two pieces of memory in turn."""

    def __init__(self, function: Callable[..., torch.Tensor], x: Array, axis: int) -> None:
        self.function, self.shape, self.dtype = function, x.shape, x.dtype
        self.memory = [np.empty(x.size, x.dtype), np.empty(x.size // 2, x.dtype)]
        self.first: Callable[[Array], object]  # takes the argument
        self.steps: list[Callable[[], object]] = []
        before, length, after = x.shape[:axis], x.shape[axis], x.shape[axis + 1 :]
        tile: Array | None = None  # where the last step left it; None: in the argument
        while length > (1 if after else 2 * _SHORT):
            length //= 2
            tile = self._fold(tile, (*before, length, *after), axis)
        while length > 1:
            tile = self._turn(tile, prod(before), np.dtype(_WORDS[length]), length)
            while len(tile) > 1:
                tile = self._fold(tile, (len(tile) // 2, *tile.shape[1:]), 0)
            length = tile.size // prod(before)
        self.result = cast("Array", tile).reshape(*before, *after)

    def run(self, x: Array) -> Array:
        """Do all steps."""
        self.first(x)
        for step in self.steps:
            step()
        return self.result.copy()

    def _place(self, *shape: int) -> Array:
        """Memory that the last step did not write."""
        memory = self.memory[0]
        self.memory.reverse()
        return memory[: prod(shape)].reshape(shape)

    def _fold(self, tile: Array | None, shape: tuple[int, ...], axis: int) -> Array:
        """One half with the other, into `shape`."""
        function, target, whole = self.function, self._place(*shape), (slice(None),) * axis
        out = as_tensor(target)
        left, right = (*whole, slice(shape[axis])), (*whole, slice(shape[axis], None))
        if tile is None:
            self.first = lambda x: function(as_tensor(x[left]), as_tensor(x[right]), out=out)
        else:
            a, b = as_tensor(tile[left]), as_tensor(tile[right])
            self.steps.append(partial(function, a, b, out=out))
        return target

    def _turn(self, tile: Array | None, rows: int, word: np.dtype[Any], length: int) -> Array:
        """Rows of `length` as columns; what makes a word stays together."""
        columns = length * self.dtype.itemsize // word.itemsize
        target = self._place(columns, rows * length // columns)
        moved = target.view(np.int16).view(word)

        def turned(x: Array) -> Array:
            words: Array = x.view(np.int16).view(word)
            return words.reshape(rows, columns).T

        if tile is None:
            self.first = lambda x: np.copyto(moved, turned(np.ascontiguousarray(x)))
        else:
            self.steps.append(partial(np.copyto, moved, turned(tile)))
        return target
