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


def by_run(access: Access, cells: Cells, values: Array) -> Array:
    """A tile of values, spread out, with the runs along the last axis."""
    spread = values
    if values.shape[1:] != access.shape:
        spread = np.broadcast_to(values, (values.shape[0], *access.shape))
    if cells.axis is None:
        return spread
    if cells.axis != len(access.shape) - 1:
        spread = np.moveaxis(spread, cells.axis + 1, -1)
    return spread if cells.length == cells.full else spread[..., : cells.length]


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
            shape = np.broadcast_shapes(valid.shape, shape)
        values = np.empty((*shape, cells.full), access.carrier)
        values[...] = first_fill
        if cells.length:
            where: Any = ...
            if valid is not None:  # masked-off runs are not even looked at
                where = np.broadcast_to(valid, shape)
                index = np.broadcast_to(index, shape)[where]
            runs = access.decode(arg.window(arg.flat, cells.length)[index])
            values[where, : cells.length] = runs
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
