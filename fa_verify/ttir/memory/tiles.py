"""Between tiles of values and the cells they lie in: runs, windows, other types of one width."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

import numpy as np

from fa_verify.ttir.errors import Unsupported
from fa_verify.ttir.numbers.floats import RAW, Array

if TYPE_CHECKING:
    from fa_verify.ttir.memory.argument import Argument
    from fa_verify.ttir.memory.cells import Access, Cells


def spread(x: Array, shape: tuple[int, ...]) -> Array:
    """An array broadcast to a shape that it may have."""
    return x if x.shape == shape else np.broadcast_to(x, shape)


def first_rows(valid: Array) -> int | None:
    """How many rows of a tile are meant, if these are the first ones in all programs alike."""
    if valid.ndim != 2 or valid.shape[0] != 1:
        return None
    count = int(np.count_nonzero(valid))
    return count if valid[0, :count].all() else None


def by_run(access: Access, cells: Cells, values: Array) -> Array:
    """A tile of values, spread out, with the runs along the last axis."""
    tile = spread(values, (values.shape[0], *access.shape))
    if cells.axis is None:
        return tile
    if cells.axis != len(access.shape) - 1:
        tile = np.moveaxis(tile, cells.axis + 1, -1)
    return tile if cells.length == cells.full else tile[..., : cells.length]


def load_window(access: Access, arg: Argument, cells: Cells, fill: Any) -> Array:
    """A tile loaded run by run; where there is none, `fill`."""
    axis, rank = cells.axis or 0, len(access.shape)
    index, valid = cells.index, cells.valid
    first_fill = fill if fill.ndim == 0 else fill.reshape(-1)[0]
    shape = index.shape
    if valid is None and 0 < cells.length == cells.full:
        values = access.decode(arg.window(arg.flat, cells.length)[index])
    else:
        if valid is not None:
            shape = np.broadcast(valid, index).shape
        values = np.empty((*shape, cells.full), access.carrier)
        values[...] = first_fill
        if cells.length:
            where: tuple[Any, ...] = (...,)
            if valid is not None:  # masked-off runs are not even looked at
                count = first_rows(valid)
                chosen = spread(valid, shape) if count is None else slice(count)
                where = (chosen,) if count is None else (slice(None), chosen)
                index = spread(index, shape)[where]
            runs = access.decode(arg.window(arg.flat, cells.length)[index])
            values[(*where, slice(cells.length))] = runs
    if axis != rank - 1:
        values = np.moveaxis(values, -1, axis + 1)
    if fill.size == 1:
        return values
    keep = np.ones(1, np.bool_) if valid is None else np.expand_dims(valid, axis + 1)
    inside = np.arange(cells.full) < cells.length
    keep = keep & inside.reshape([-1 if d == axis + 1 else 1 for d in range(rank + 1)])
    return np.where(keep, values, fill)


def reinterpret(arg: Argument, scalar: str) -> Argument:
    """The same argument seen as elements of another type of the same width."""
    if RAW[scalar].itemsize != arg.flat.dtype.itemsize:
        msg = f"a pointer to {arg.scalar} used as a pointer to {scalar}"
        raise Unsupported(msg)
    seen = copy.copy(arg)
    seen.scalar, seen.flat = scalar, arg.flat.view(RAW[scalar])
    seen.forget_windows()
    return seen
