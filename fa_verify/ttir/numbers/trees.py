"""Sums and products of 16-bit tiles along an axis: halves combined with halves, rounded each time.

The order and the roundings are those of `ops.reductions` for any combine region; here each level is
one call of torch, into memory that is kept for the next tile of the same shape.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from fa_verify.ttir.numbers.shorts import as_tensor

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

    from fa_verify.ttir.numbers.floats import Array

# Rows that are added in parts of so few elements cost more than turned ones: 2048 rows of twice 16
# elements take 68 us, of twice 32 10 us; turning 2048 rows of 32 takes 11 us.
_SHORT = 16
_WORDS: dict[int, Any] = {1: np.int16, 2: np.int32, 4: np.int64}  # neighbours that are moved as one


class Tree:
    """A reduction by `function(a, b, out=...)`, which rounds to the type of its operands."""

    def __init__(self, function: Callable[..., torch.Tensor], axis: int) -> None:
        """`axis` has an extent that is a power of two above 1."""
        self.function = function
        self.axis = axis
        self.plan: _Plan | None = None

    def __call__(self, x: Array) -> Array:
        """A short array without its axis."""
        if self.plan is None or (self.plan.shape, self.plan.dtype) != (x.shape, x.dtype):
            self.plan = _Plan(self.function, x, self.axis)
        return self.plan.run(x)


class _Plan:
    """The steps for tiles of one shape, each into memory of its own."""

    def __init__(self, function: Callable[..., torch.Tensor], x: Array, axis: int) -> None:
        self.function, self.shape, self.dtype = function, x.shape, x.dtype
        self.steps: list[Callable[[Array], object]] = []
        innermost = axis == x.ndim - 1
        tile: Array | None = None  # where the last step left it; None: in the argument
        length = x.shape[axis]
        while length > (2 * _SHORT if innermost else 1):
            length //= 2
            tile = self._fold(tile, (*x.shape[:axis], length, *x.shape[axis + 1 :]), axis)
        while innermost and length > 1:
            word = min(4, length // 2)
            columns = length // word
            tile = self._turn(tile, x.size // x.shape[axis], columns, word)
            while columns > 1:
                columns //= 2
                tile = self._fold(tile, (columns, *tile.shape[1:]), 0)
            length = word
        shape = (*x.shape[:axis], *x.shape[axis + 1 :])
        self.result = None if tile is None else tile.reshape(shape)
        self.reduced = shape

    def run(self, x: Array) -> Array:
        """Do all steps."""
        for step in self.steps:
            step(x)
        return x.reshape(self.reduced) if self.result is None else self.result.copy()

    def _fold(self, tile: Array | None, shape: tuple[int, ...], axis: int) -> Array:
        """One half with the other, into `shape`."""
        function, sizes = self.function, (shape[axis], shape[axis])
        target = np.empty(shape, self.dtype)
        out = as_tensor(target)
        if tile is None:
            self.steps.append(
                lambda x: function(*as_tensor(x).split_with_sizes(sizes, axis), out=out)
            )
        else:
            left, right = as_tensor(tile).split_with_sizes(sizes, axis)
            self.steps.append(lambda _: function(left, right, out=out))
        return target

    def _turn(self, tile: Array | None, rows: int, columns: int, word: int) -> Array:
        """Rows as columns; `word` neighbours stay together."""
        target = np.empty((columns, rows * word), self.dtype)
        moved = target.view(np.int16).view(_WORDS[word])

        def turned(x: Array) -> Array:
            words: Array = x.view(np.int16).view(_WORDS[word])
            return words.reshape(rows, columns).T

        if tile is None:
            self.steps.append(lambda x: np.copyto(moved, turned(np.ascontiguousarray(x))))
        else:
            source = turned(tile)
            self.steps.append(lambda _: np.copyto(moved, source))
        return target
