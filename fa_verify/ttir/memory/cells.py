"""How a tile of addresses is described: element by element, or as windows of consecutive elements.

A window is a tile whose addresses along one axis are consecutive, the same for every program, and
masked by a prefix. Loads and stores move it run by run. Knows arguments and arrays; reports
nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from fa_verify.ttir.memory.values import conjunction, total
from fa_verify.ttir.numbers.floats import CARRIER, RAW, decode, encode, poison

if TYPE_CHECKING:
    from fa_verify.ttir.memory.argument import Argument
    from fa_verify.ttir.memory.values import Terms
    from fa_verify.ttir.numbers.floats import Array
    from fa_verify.ttir.sanitizer.findings import Site

_SHORTEST_WINDOW = 4
_REMEMBERED = 512
_FEW = 4096  # sorting more addresses costs more than it can save


@dataclass(frozen=True, slots=True, eq=False)
class Access:
    """What is known of a memory operation before it runs: place, tile shape, element type.

    `checked` is a load whose result a compare-and-swap checks (see `lowering.retries`); `sides` are
    the numbers of what a mask shows and hides (see `engine.coverage`), if there is one; `short` is
    a load whose tile stays in 16 bits (see `lowering.shorts`).
    """

    site: Site
    shape: tuple[int, ...]
    scalar: str
    checked: bool = False
    sides: tuple[int, int] | None = None
    short: bool = False

    @property
    def carrier(self) -> np.dtype[Any]:
        """What elements are handled as while they are loaded."""
        return RAW[self.scalar] if self.short else CARRIER[self.scalar]

    @property
    def poison(self) -> Any:
        """What an illegal read yields."""
        value = poison(self.scalar)
        return encode(np.array([value]), self.scalar)[0] if self.short else value

    def decode(self, raw: Array) -> Array:
        """Turn elements as they lie in memory into what they are handled as."""
        return raw if self.short else decode(raw, self.scalar)


@dataclass(slots=True, eq=False)
class Cells:
    """Addresses of a tile inside one argument.

    Attributes:
        index: First element of each run, (programs or 1, *tile without axis).
        valid: Which entries of `index` are meant; None: all.
        axis: Tile axis the runs lie along; None: every element stands for itself.
        length: Elements in a run.
        full: Extent of the tile along `axis`.
    """

    index: Array
    valid: Array | None
    axis: int | None
    length: int
    full: int

    def of(self, arg: Argument, array: Array) -> Array:
        """`array`, which covers the argument's span, as something to be indexed by `index`."""
        return array if self.axis is None else arg.window(array, self.length)


@dataclass(slots=True, eq=False)
class Touched:
    """The cells one operation touches, flattened: which element, and by whom.

    Attributes:
        access: The operation.
        arg: The argument the cells lie in.
        cells: Their description.
        index: First element of each valid run, one-dimensional.
        program: Number of the touching program + 1, for each entry of `index`.
    """

    access: Access
    arg: Argument
    cells: Cells
    index: Array
    program: Array

    @property
    def me(self) -> Array:
        """`program`, shaped to compare with what is read through `of`."""
        return self.program if self.cells.axis is None else self.program[:, None]

    def of(self, array: Array) -> Array:
        """`array` (over the span) as something to be indexed by `index`."""
        return self.cells.of(self.arg, array)

    def apart(self) -> bool:
        """Whether it is plain that no element is touched twice."""
        index, length = self.index, max(self.cells.length, 1)
        if int((index[1:] - index[:-1]).min(initial=length)) >= length:
            return True
        if index.size > _FEW:
            return False
        ordered = np.sort(index)
        return int((ordered[1:] - ordered[:-1]).min()) >= length

    def first(self, wrong: Array) -> tuple[tuple[int, ...], int, int]:
        """Where `wrong` is first true: its position, the element's offset, the program + 1."""
        where = np.unravel_index(int(np.argmax(wrong)), wrong.shape)
        place = tuple([int(x) for x in where])
        offset = int(self.index[place[0]]) + (place[1] if len(place) > 1 else 0)
        return place, offset, int(self.program[place[0]])


def elementwise(terms: Terms, masks: Terms) -> Cells:
    """Describe a tile element by element."""
    keep = conjunction(masks) if masks else None
    if keep is not None and keep.all():
        keep = None
    return Cells(total(terms), keep, None, 1, 1)


def _alike(term: Array) -> Array:
    """A term with a single row where all programs have the same."""
    if term.shape[0] == 1 or term.flat[0] != term.flat[-1]:
        return term
    return term[:1] if (term[1:] == term[:1]).all() else term


def differs(mask: Array) -> bool:
    """Whether a mask varies both inside a tile and from program to program."""
    return bool(1 < mask.shape[0] < mask.size)


class Planner:
    """Finds windows. Remembers facts about arrays that stay the same through a loop."""

    def __init__(self) -> None:
        self._ranges: dict[int, tuple[Array, Array | None]] = {}
        self._prefixes: dict[int, tuple[Array, int | None]] = {}
        self._whole: tuple[Array | None, Array | None] = (None, None)

    def _range(self, term: Array) -> Array | None:
        """First element for each program if `term` counts up by one in all of them, else None."""
        found = self._ranges.get(id(term))
        if found is None:
            rows = term.reshape(term.shape[0], -1)
            counts = bool((rows[:, 1:] - rows[:, :-1] == 1).all())
            first = rows[:, 0].reshape((-1,) + (1,) * (term.ndim - 1)) if counts else None
            if len(self._ranges) > _REMEMBERED:
                self._ranges.clear()
            # Keeping the array keeps its identity from being reused.
            found = self._ranges[id(term)] = (term, first)
        return found[1]

    def _prefix(self, mask: Array) -> int | None:
        """Number of leading trues if nothing but falses follows, alike in all programs."""
        found = self._prefixes.get(id(mask))
        if found is None:
            rows = mask.reshape(mask.shape[0], -1)
            count = int(np.count_nonzero(rows[0]))
            prefix = bool(rows[:, :count].all()) and not rows[:, count:].any()
            if len(self._prefixes) > _REMEMBERED:
                self._prefixes.clear()
            found = self._prefixes[id(mask)] = (mask, count if prefix else None)
        return found[1]

    def _masks(self, masks: Terms, axis: int, extent: int) -> tuple[int, list[Array]] | None:
        """(length of the run, masks of whole runs), or None if the mask is no prefix."""
        length, valid = extent, []
        for mask in masks:
            if mask.size == 1:
                length = length if mask.reshape(-1)[0] else 0
            elif mask.shape[axis + 1] == 1:
                valid.append(mask)
            else:
                alone = mask.size == extent * mask.shape[0]
                prefix = self._prefix(mask) if alone else None
                if prefix is None:
                    return None
                length = min(length, prefix)
        return length, valid

    def whole(self, masks: Terms) -> Array | None:
        """Programs that the masks which differ from program to program hide nothing from.

        None if there are no such masks or no such programs.
        """
        dense = [m for m in masks if differs(m)]
        if not dense:
            return None
        if self._whole[0] is not dense[0] or len(dense) > 1:
            rows = conjunction([np.all(m.reshape(m.shape[0], -1), axis=1) for m in dense])
            self._whole = (dense[0], rows if rows.any() else None)
        return self._whole[1]

    def windows(self, terms: Terms, masks: Terms, shape: tuple[int, ...]) -> Cells | None:
        """Describe a tile of addresses by windows, if it can be."""
        for axis in range(len(shape) - 1, -1, -1):
            extent = shape[axis]
            along = [t for t in terms if t.shape[axis + 1] != 1]
            if extent < _SHORTEST_WINDOW or len(along) != 1:
                continue
            if along[0].size != extent * along[0].shape[0]:
                continue
            first = self._range(along[0])
            masked = None if first is None else self._masks(masks, axis, extent)
            if first is None or masked is None:
                continue
            length, valid = masked
            parts = [t for t in terms if t is not along[0]]
            parts.append(first)
            index = total([_alike(t) for t in parts]).squeeze(axis + 1)
            keep = conjunction(valid).squeeze(axis + 1) if valid else None
            if keep is not None and keep.all():
                keep = None
            return Cells(index, keep, axis, length, extent)
        return None


def outside(arg: Argument, cells: Cells) -> Array | None:
    """Which runs are not wholly legal, masked-off ones included; None if all are."""
    index = cells.index
    if index.size == 0 or cells.length == 0:
        return None
    inside = int(index.min()) >= 0 and int(index.max()) + cells.length <= arg.size
    if inside and arg.runs is None:
        return None
    bad = (index < 0) | (index > arg.size - cells.length)
    if arg.runs is not None:
        bad |= arg.runs.take(index, mode="clip") < cells.length
        if not bad.any():
            return None
    return bad


def rounds(touched: Touched) -> list[Any]:
    """Split flattened cells into parts without repetition that keep each address's lane order."""
    index, cells = touched.index, touched.cells
    apart = 1 if cells.axis is None else cells.length
    if index.size == 1:
        return [slice(None)]
    order = np.argsort(index, kind="stable")
    gaps = np.diff(index[order])
    if (gaps >= apart).all():
        return [slice(None)]
    if cells.axis is not None:  # windows may overlap in part: program by program, or run by run
        parts: list[Any] = []
        for who in dict.fromkeys(touched.program.tolist()):
            rows = np.flatnonzero(touched.program == who)
            clean = (np.diff(np.sort(index[rows])) >= apart).all()
            parts += [rows] if clean else [np.array([r]) for r in rows]
        return parts
    starts = np.concatenate([[True], gaps != 0])
    group = np.maximum.accumulate(np.where(starts, np.arange(index.size), 0))
    rank = np.empty(index.size, np.int64)
    rank[order] = np.arange(index.size) - group
    by_rank = np.argsort(rank, kind="stable")
    edges = np.flatnonzero(np.diff(rank[by_rank])) + 1
    return np.split(by_rank, edges)
