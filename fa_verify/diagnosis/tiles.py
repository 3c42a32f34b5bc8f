"""Accesses that stray by just the rest of a tile: a mask is missing there, and no more."""

from __future__ import annotations

import itertools
import math
import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fa_verify.backends.base import Incident

__all__ = ["PAST", "between_rows", "tile_of"]

PAST = re.compile(r"up to (\d+) elements? past the end of \w+ \(shape \((.*?)\), strides \((.*?)\)")
_BETWEEN = re.compile(r"between the elements of \w+.*?\(shape \((?:\d+, )*(\d+),?\)")
_MOST_SLICES = 4096  # rows or heads in which an access may begin to stray
_TILES = (16, 32, 64, 128, 256)  # rows and columns of usual tiles


def between_rows(incident: Incident) -> bool:
    """Whether the rest of a tile's row lies between rows: none does of whole tiles."""
    shape = _BETWEEN.search(incident.detail)
    return shape is not None and int(shape[1]) not in _TILES


def tile_of(incident: Incident) -> tuple[int, ...]:
    """Axes, from the last one, along which just the rest of a tile lies past the end."""
    found = PAST.search(incident.detail)
    if found is None:
        return ()
    sizes, strides = ([int(n) for n in re.findall(r"\d+", found[i])] for i in (2, 3))
    spans = [(size - 1) * stride for size, stride in zip(sizes, strides, strict=True)]
    last = sum(spans) + int(found[1])
    tiles = []
    for axis in range(len(sizes) - 1, max(-1, len(sizes) - 3), -1):
        outer = math.prod(sizes[:axis])
        if not strides[axis] or not 0 < outer <= _MOST_SLICES:
            continue
        starts = {sum(x) for x in itertools.product(*_multiples(sizes[:axis], strides[:axis]))}
        index, rest = divmod(last - sum(spans) + spans[axis], strides[axis])
        whole = rest == 0 and any(-(-sizes[axis] // n) * n == index + 1 for n in _TILES)
        if axis == 3:  # a tile of columns is a power of two wide, and not one row more
            whole = rest == 0 and index + 1 in _TILES and index + 1 != 2 * sizes[axis]
        if whole and incident.offset - sizes[axis] * strides[axis] in starts:
            tiles.append(axis - len(sizes))
    return tuple(tiles)


def _multiples(sizes: list[int], strides: list[int]) -> list[list[int]]:
    return [[i * stride for i in range(size)] for size, stride in zip(sizes, strides, strict=True)]
