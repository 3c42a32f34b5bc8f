"""Carries out loads, stores and atomics through pointers, and looks at each for mistakes.

Two ways lead to memory. A tile whose innermost addresses are consecutive, the same for every program and
masked by a prefix (a "window") is moved run by run; anything else element by element. Both reduce to a
set of cells of one argument, each with the program that touches it, and share all checks.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, Any

import numpy as np

from fa_verify.ttir.errors import Unsupported
from fa_verify.ttir.floats import CARRIER, RAW, Array, decode, encode, poison
from fa_verify.ttir.memory import MANY
from fa_verify.ttir.values import Pointer, conjunction, total

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from fa_verify.ttir.findings import Findings, Site
    from fa_verify.ttir.machine import Machine
    from fa_verify.ttir.memory import Argument
    from fa_verify.ttir.values import Terms

_SHORTEST_WINDOW = 4


@dataclass(slots=True, eq=False)
class Cells:
    """Addresses of a tile inside one argument.

    `index` has shape (programs or 1, *tile without axis) and holds the first element of a run of
    `length` elements along `axis`; without axis (None) every element stands for itself. `valid` masks
    `index` (None: all). `full` is the extent of the tile along `axis`.
    """

    index: Array
    valid: Array | None
    axis: int | None
    length: int
    full: int


class Accesses:
    """Memory operations of one launch."""

    def __init__(self, machine: Machine, findings: Findings, *, sanitize: bool) -> None:
        """Work for `machine`, reporting to `findings` when `sanitize`."""
        self.machine, self.findings, self.sanitize = machine, findings, sanitize
        self._ranges: dict[int, tuple[Array, int | None]] = {}
        self._prefixes: dict[int, tuple[Array, int | None]] = {}
        self.order = Order()

    # -- shape of an access
    def _range(self, term: Array) -> int | None:
        """First element if `term` counts up by one, else None. Remembered by identity."""
        found = self._ranges.get(id(term))
        if found is None:
            flat = term.reshape(-1)
            first = int(flat[0])
            counts = int(flat[-1]) - first == flat.size - 1 and bool((np.diff(flat) == 1).all())
            if len(self._ranges) > 512:
                self._ranges.clear()
            found = self._ranges[id(term)] = (term, first if counts else None)
        return found[1]

    def _prefix(self, mask: Array) -> int | None:
        """Number of leading trues if nothing but falses follows, else None."""
        found = self._prefixes.get(id(mask))
        if found is None:
            flat = mask.reshape(-1)
            count = int(np.count_nonzero(flat))
            if len(self._prefixes) > 512:
                self._prefixes.clear()
            found = self._prefixes[id(mask)] = (mask, count if flat[:count].all() else None)
        return found[1]

    def cells(self, terms: Terms, masks: Terms, shape: tuple[int, ...]) -> Cells:
        """Find the cheapest description of a tile of addresses."""
        for axis in range(len(shape) - 1, -1, -1):
            if shape[axis] < _SHORTEST_WINDOW:
                continue
            along = [t for t in terms if t.shape[axis + 1] != 1]
            if len(along) != 1 or along[0].size != shape[axis]:
                continue
            first = self._range(along[0])
            if first is None:
                continue
            length: int | None = shape[axis]
            valid: list[Array] = []
            for mask in masks:
                if mask.shape[axis + 1] == 1:
                    if mask.size == 1:
                        if not mask.reshape(-1)[0]:
                            length = 0
                        continue
                    valid.append(mask)
                    continue
                prefix = self._prefix(mask) if mask.size == shape[axis] else None
                if prefix is None:
                    length = None
                    break
                length = min(length or 0, prefix)
            if length is None:
                continue
            rest = [t for t in terms if t is not along[0]]
            index = total(rest) + first if rest else np.full((1,) * (len(shape) + 1), first)
            index = index.squeeze(axis + 1)
            keep = conjunction(valid).squeeze(axis + 1) if valid else None
            if keep is not None and keep.all():
                keep = None
            if index.shape[0] > 1 and (index == index[:1]).all():
                index = index[:1]
            return Cells(index, keep, axis, length, shape[axis])
        index = total(terms)
        keep = conjunction(masks) if masks else None
        if keep is not None and keep.all():
            keep = None
        return Cells(index, keep, None, 1, 1)

    def assertion(self, site: Site, lane: int, count: int, message: str) -> None:
        """Report a device assertion that failed."""
        self.findings.add("assertion-failed", site, None, self._program(lane), 0, count, message)

    # -- checks
    def _outside(self, arg: Argument, cells: Cells) -> Array | None:
        """Which runs of `cells` are not wholly legal, masked-off ones included; None if none."""
        index = cells.index
        if index.size == 0 or cells.length == 0:
            return None
        inside_span = int(index.min()) >= 0 and int(index.max()) + cells.length <= arg.size
        if inside_span and arg.runs is None:
            return None
        bad = (index < 0) | (index > arg.size - cells.length)
        if arg.runs is not None:
            if arg.size:
                runs = arg.runs.take(index, mode="clip")
                bad |= runs < cells.length
            if not bad.any():
                return None
        return bad

    def resolve(
        self,
        arg: Argument,
        terms: Terms,
        masks: Terms,
        shape: tuple[int, ...],
        site: Site,
        kind: str,
    ) -> Cells:
        """Describe a tile's legal cells; whatever lies outside is reported and masked off.

        The result's `index` is safe to use as it is: masked-off entries are moved inside.
        """
        cells = self.cells(terms, masks, shape)
        bad = self._outside(arg, cells)
        if bad is None:
            return cells
        wrong = bad if cells.valid is None else bad & cells.valid
        if wrong.any():
            if cells.axis is not None:  # look again, element by element
                keep = conjunction(masks) if masks else None
                cells = Cells(total(terms), keep, None, 1, 1)
                bad = self._outside(arg, cells)
                if bad is None:
                    return cells
                wrong = bad if cells.valid is None else bad & cells.valid
            if self.sanitize and wrong.any():
                self._report_outside(kind, site, arg, cells.index, wrong, shape)
            cells.valid = ~bad if cells.valid is None else cells.valid & ~bad
        if bad.any():
            cells.index = np.where(bad, 0, cells.index)
        if cells.axis is not None and arg.size < cells.length:
            cells.length = 0
        return cells

    def _program(self, lane: int) -> tuple[int, int, int]:
        return self._position(int(self.machine.lanes.linear[lane]))

    def _position(self, linear: int) -> tuple[int, int, int]:
        nx, ny, _ = self.machine.grid
        return (linear % nx, linear // nx % ny, linear // (nx * ny))

    def _report_outside(
        self,
        kind: str,
        site: Site,
        arg: Argument,
        index: Array,
        wrong: Array,
        shape: tuple[int, ...],
    ) -> None:
        common = np.broadcast_shapes(index.shape, wrong.shape)
        index, wrong = np.broadcast_to(index, common), np.broadcast_to(wrong, common)
        lane = np.unravel_index(int(np.argmax(wrong)), common)
        offset = int(index[lane])
        count = int(np.count_nonzero(wrong)) * (prod(shape) // prod(common[1:]))
        if common[0] == 1:
            count *= self.machine.lanes.linear.size
        furthest = index[wrong]
        low, high = int(furthest.min()), int(furthest.max())
        if high >= arg.size or low < 0:
            beyond = max(high - arg.size + 1, -low)
            side = "past the end" if high >= arg.size else "before the beginning"
            detail = f"up to {beyond} element(s) {side} of {arg.name}"
        else:
            detail = f"between the elements of {arg.name}"
        detail += f" (shape {arg.sizes}, strides {arg.strides})"
        detail += "; the mask let it through" if site.masked else "; the access has no mask"
        self.findings.add(kind, site, arg, self._program(int(lane[0])), offset, count, detail)

    def _select(self, cells: Cells, *others: Array) -> tuple[Array, Array, list[Array]]:
        """Flatten the valid cells: (index, program + 1, others), other arrays shaped like index."""
        index, valid = cells.index, cells.valid
        lanes = self.machine.lanes.linear
        shapes = [index.shape, *[o.shape[: index.ndim] for o in others]]
        if valid is not None:
            shapes.append(valid.shape)
        shape = np.broadcast_shapes(*shapes)
        program = lanes + np.int32(1)
        if shape[0] == 1:
            program = program[:1]
        program = np.broadcast_to(program.reshape((-1,) + (1,) * (len(shape) - 1)), shape)
        spread = [np.broadcast_to(o, shape + o.shape[index.ndim :]) for o in others]
        index = np.broadcast_to(index, shape)
        if valid is None:
            tails = [o.reshape((-1, *o.shape[len(shape) :])) for o in spread]
            return index.reshape(-1), program.reshape(-1), tails
        valid = np.broadcast_to(valid, shape)
        return index[valid], program[valid], [o[valid] for o in spread]

    def _lookup(self, arg: Argument, array: Array, cells: Cells) -> Array:
        """`array` (over the argument's span) as something to index by cells."""
        return array if cells.axis is None else arg.window(array, cells.length)

    def _column(self, cells: Cells, program: Array) -> Array:
        return program if cells.axis is None else program[:, None]

    def _race(
        self,
        site: Site,
        arg: Argument,
        index: Array,
        program: Array,
        other: Array,
        wrong: Array,
        how: str,
    ) -> None:
        """Report races at flattened cells; `other` and `wrong` have one more axis for windows."""
        if not wrong.any():
            return
        if self.order.known:
            wrong = wrong & ~self.order.precedes(other, program)
            if not wrong.any():
                return
        where = np.unravel_index(int(np.argmax(wrong)), wrong.shape)
        offset = int(index[where[0]]) + (int(where[1]) if len(where) > 1 else 0)
        me = self._position(int(program[where[0]]) - 1)
        number = int(other[where])
        who = f"program {self._position(number - 1)}" if number > 0 else "other programs"
        detail = (
            f"program {me} {how.format(who=who)} in the same launch, with nothing to order them"
        )
        self.findings.add("race", site, arg, me, offset, int(np.count_nonzero(wrong)), detail)

    def _watch_read(self, site: Site, arg: Argument, cells: Cells) -> None:
        """Race bookkeeping of a plain load."""
        tracking = arg.tracking
        assert tracking is not None
        index, program, _ = self._select(cells)
        if index.size == 0 or cells.length == 0:
            return
        if cells.index.shape[0] == 1 and self.machine.lanes.linear.size > 1:
            lanes = self.machine.lanes.linear + np.int32(1)
            index, program = np.tile(index, lanes.size), np.repeat(lanes, index.size)
        me = self._column(cells, program)
        writer = self._lookup(arg, arg.track(tracking.writer), cells)[index]
        self._race(site, arg, index, program, writer, (writer > 0) & (writer != me),
                   "reads what {who} wrote")  # fmt: skip
        if tracking.atomic is not None:
            atomic = self._lookup(arg, arg.track(tracking.atomic), cells)[index]
            self._race(site, arg, index, program, atomic, (atomic != 0) & (atomic != me),
                       "reads plainly what {who} updates atomically")  # fmt: skip
        first, last = tracking.readers()
        view = self._lookup(arg, arg.track(last), cells)
        view[index] = me
        view = self._lookup(arg, arg.track(first), cells)
        seen = view[index]
        view[index] = np.where(seen == 0, me, seen)

    def _watch_write(
        self, site: Site, arg: Argument, cells: Cells, index: Array, program: Array, raw: Array
    ) -> None:
        """Race bookkeeping of a plain store, before it is carried out."""
        tracking = arg.tracking
        assert tracking is not None
        me = self._column(cells, program)
        writers = self._lookup(arg, arg.track(tracking.writer), cells)
        before = writers[index]
        conflict = (before != 0) & (before != me)
        if self.order.known and conflict.any():
            conflict &= ~self.order.precedes(before, program)
        others: list[tuple[Array, Array, str]] = []
        if conflict.any():
            others.append((before, conflict, "overwrites with another value what {who} wrote"))
        if tracking.first_reader is not None and tracking.last_reader is not None:
            for array in (tracking.first_reader, tracking.last_reader):
                reader = self._lookup(arg, arg.track(array), cells)[index]
                read = (reader != 0) & (reader != me)
                if read.any():
                    others.append((reader, read, "writes what {who} read"))
        if tracking.atomic is not None:
            atomic = self._lookup(arg, arg.track(tracking.atomic), cells)[index]
            mixed = (atomic != 0) & (atomic != me)
            self._race(site, arg, index, program, atomic, mixed,
                       "writes plainly what {who} updates atomically")  # fmt: skip
        if others:
            flat = self._lookup(arg, arg.flat, cells)
            changed = _bits(flat[index]) != _bits(raw)
            for other, wrong, how in others:
                self._race(site, arg, index, program, other, wrong & changed, how)
            conflict &= ~changed  # several wrote the same value, which is harmless
        writers[index] = np.where(conflict, np.int32(MANY), me) if conflict.any() else me

    def _watch_collisions(
        self, site: Site, arg: Argument, cells: Cells, index: Array, program: Array, raw: Array
    ) -> None:
        """Find programs that wrote different values to one cell in the same store."""
        tracking = arg.tracking
        assert tracking is not None
        me = self._column(cells, program)
        after = self._lookup(arg, arg.track(tracking.writer), cells)[index]
        lost = (after != me) & (after != MANY)
        if lost.any():
            now = self._lookup(arg, arg.flat, cells)[index]
            wrong = lost & (_bits(now) != _bits(raw))
            self._race(site, arg, index, program, after, wrong,
                       "writes another value than {who} to the same element")  # fmt: skip
            view = self._lookup(arg, arg.track(tracking.writer), cells)
            view[index] = np.where(lost, np.int32(MANY), view[index])

    def _check_written(self, site: Site, arg: Argument, cells: Cells) -> None:
        """Report reads of elements that nobody wrote."""
        assert arg.shadow is not None
        if cells.index.size == 0 or cells.length == 0:
            return
        written = self._lookup(arg, arg.shadow, cells)[cells.index]
        if written.all():
            return
        index, program, (written,) = self._select(cells, written)
        missing = ~written
        if not missing.any():
            return
        where = np.unravel_index(int(np.argmax(missing)), missing.shape)
        offset = int(index[where[0]]) + (int(where[1]) if len(where) > 1 else 0)
        self.findings.add(
            "uninitialised-read", site, arg, self._position(int(program[where[0]]) - 1), offset,
            int(np.count_nonzero(missing)), f"nobody wrote this element of {arg.name}",
        )  # fmt: skip

    # -- load
    def load(
        self, pointer: Pointer, masks: Terms, other: Array | None, shape: tuple[int, ...], scalar: str,
        site: Site,
    ) -> Array:  # fmt: skip
        """Load a tile; masked-off lanes get `other` (0 when None, as NVIDIA's code leaves them)."""
        if len(pointer.args) == 1:
            return self._load_one(pointer.args[0], pointer.terms, masks, other, shape, scalar, site)
        assert pointer.which is not None
        result: Array | None = None
        for number, arg in enumerate(pointer.args):
            mine = pointer.which == number
            if not mine.any():
                continue
            part = self._load_one(arg, pointer.terms, (*masks, mine), other, shape, scalar, site)
            result = part if result is None else np.where(mine, part, result)
        assert result is not None
        return result

    def _load_one(
        self, arg: Argument, terms: Terms, masks: Terms, other: Array | None, shape: tuple[int, ...],
        scalar: str, site: Site,
    ) -> Array:  # fmt: skip
        if arg.scalar != scalar:
            arg = _reinterpret(arg, scalar)
        cells = self.resolve(arg, terms, masks, shape, site, "out-of-bounds-read")
        if self.sanitize:
            if arg.shadow is not None:
                self._check_written(site, arg, cells)
            if arg.tracking is not None:
                self._watch_read(site, arg, cells)
        carrier = CARRIER[scalar]
        fill = carrier.type(0) if other is None else other
        if cells.axis is None:
            if arg.size == 0:
                lanes = np.broadcast_shapes(
                    cells.index.shape, () if cells.valid is None else cells.valid.shape
                )
                values = np.zeros(lanes, carrier)
            else:
                values = decode(arg.flat.take(cells.index, mode="clip"), scalar)
            if cells.valid is None:
                return values
            mask = conjunction(masks) if masks else None
            if mask is None:
                return np.where(cells.valid, values, poison(scalar))
            legal = np.where(cells.valid, values, poison(scalar))
            return np.where(mask, legal, fill)
        return self._load_window(arg, cells, fill, scalar, len(shape))

    def _load_window(
        self,
        arg: Argument,
        cells: Cells,
        fill: Any,
        scalar: str,
        rank: int,
    ) -> Array:
        axis, carrier = cells.axis, CARRIER[scalar]
        assert axis is not None
        scalar_fill = np.size(fill) == 1
        first_fill = np.asarray(fill).reshape(-1)[0]
        if cells.length == 0:
            values = np.full((*cells.index.shape, cells.full), first_fill, carrier)
        else:
            raw = arg.window(arg.flat, cells.length)[cells.index]
            values = decode(raw, scalar)
            if cells.length < cells.full:
                padded = np.empty((*cells.index.shape, cells.full), carrier)
                padded[..., : cells.length] = values
                padded[..., cells.length :] = first_fill
                values = padded
        valid = cells.valid
        if valid is not None:
            if valid.shape != cells.index.shape:
                shape = np.broadcast_shapes(valid.shape, cells.index.shape)
                if values.shape[:-1] != shape:
                    values = np.broadcast_to(values, (*shape, cells.full)).copy()
                valid = np.broadcast_to(valid, shape)
            values[~valid] = first_fill
        if axis != rank - 1:
            values = np.moveaxis(values, -1, axis + 1)
        if not scalar_fill:
            keep = np.ones(1, np.bool_) if valid is None else np.expand_dims(valid, axis + 1)
            inside = np.arange(cells.full) < cells.length
            keep = keep & inside.reshape([-1 if d == axis + 1 else 1 for d in range(rank + 1)])
            values = np.where(keep, values, fill)
        return values

    # -- store
    def store(
        self, pointer: Pointer, values: Array, masks: Terms, shape: tuple[int, ...], scalar: str,
        site: Site,
    ) -> None:  # fmt: skip
        """Store a tile; lanes of later programs win where programs collide."""
        for number, arg in enumerate(pointer.args):
            if len(pointer.args) > 1:
                assert pointer.which is not None
                mine = pointer.which == number
                if mine.any():
                    self._store_one(arg, pointer.terms, values, (*masks, mine), shape, scalar, site)
            else:
                self._store_one(arg, pointer.terms, values, masks, shape, scalar, site)

    def _store_one(
        self, arg: Argument, terms: Terms, values: Array, masks: Terms, shape: tuple[int, ...],
        scalar: str, site: Site,
    ) -> None:  # fmt: skip
        if arg.scalar != scalar:
            arg = _reinterpret(arg, scalar)
        cells = self.resolve(arg, terms, masks, shape, site, "out-of-bounds-write")
        if cells.length == 0 or arg.size == 0:
            return
        index, program, raw = self._flatten(cells, values, shape, scalar)
        if index.size == 0:
            return
        watched = self.sanitize and arg.tracking is not None
        if watched:
            self._watch_write(site, arg, cells, index, program, raw)
        self._lookup(arg, arg.flat, cells)[index] = raw
        if arg.shadow is not None:
            self._lookup(arg, arg.shadow, cells)[index] = True
        if watched and self.machine.lanes.linear.size > 1:
            self._watch_collisions(site, arg, cells, index, program, raw)

    def _flatten(
        self, cells: Cells, values: Array, shape: tuple[int, ...], scalar: str
    ) -> tuple[Array, Array, Array]:
        """Valid cells as (index, program + 1, raw values)."""
        spread = np.broadcast_to(values, (values.shape[0], *shape))
        if cells.axis is not None:
            spread = np.moveaxis(spread, cells.axis + 1, -1)[..., : cells.length]
        index, program, (chosen,) = self._select(cells, spread)
        return index, program, encode(np.ascontiguousarray(chosen), scalar)

    # -- atomics
    def atomic(
        self, pointer: Pointer, masks: Terms, shape: tuple[int, ...], scalar: str, site: Site,
        operands: Sequence[Array], update: Callable[..., Array], *, used: bool, acquires: bool,
    ) -> Array:  # fmt: skip
        """Read, update and write each cell in lane order; return what was there before."""
        if len(pointer.args) != 1:
            raise Unsupported("an atomic through a pointer into several arguments")
        arg = pointer.args[0]
        if arg.scalar != scalar:
            arg = _reinterpret(arg, scalar)
        carrier = CARRIER[scalar]
        lanes = self.machine.lanes.linear.size
        cells = self.resolve(arg, pointer.terms, masks, shape, site, "out-of-bounds-write")
        if used and cells.axis is not None:
            keep = conjunction(masks) if masks else None
            cells = Cells(total(pointer.terms), keep, None, 1, 1)
            bad = self._outside(arg, cells)
            if bad is not None:
                cells.valid = ~bad if cells.valid is None else cells.valid & ~bad
                cells.index = np.where(bad, 0, cells.index)
        everyone = np.zeros((lanes, *(1,) * len(shape)), np.bool_)
        spread = [np.broadcast_to(o, (o.shape[0], *shape)) for o in operands]
        if cells.axis is not None:
            spread = [np.moveaxis(o, cells.axis + 1, -1)[..., : cells.length] for o in spread]
        else:
            everyone = np.broadcast_to(everyone, (lanes, *shape))
        if cells.axis is not None:
            everyone = everyone.squeeze(cells.axis + 1)
        index, program, (_, *chosen) = self._select(cells, everyone, *spread)
        before = np.zeros(index.shape, carrier)
        if index.size and cells.length and arg.size:
            if self.sanitize and arg.tracking is not None:
                self._watch_atomic(site, arg, cells, index, program)
                if acquires and not shape:
                    self.order.through(arg.key, arg.origin + index, program)
            self._update(arg, cells, index, program, chosen, update, before, scalar, used=used)
            if arg.shadow is not None:
                self._lookup(arg, arg.shadow, cells)[index] = True
        if not used:
            return before
        full = np.zeros((lanes, *shape), carrier)
        if cells.valid is None:
            full[...] = before.reshape(full.shape)
        else:
            full[np.broadcast_to(cells.valid, full.shape)] = before
        return full

    def _update(
        self, arg: Argument, cells: Cells, index: Array, program: Array, chosen: list[Array],
        update: Callable[..., Array], before: Array, scalar: str, *, used: bool,
    ) -> None:  # fmt: skip
        view = self._lookup(arg, arg.flat, cells)
        for part in _rounds(index, program, cells):
            where = index[part]
            old = decode(view[where], scalar)
            new = update(old, *[c[part] for c in chosen])
            view[where] = encode(np.ascontiguousarray(new), scalar)
            if used:
                before[part] = old

    def _watch_atomic(
        self, site: Site, arg: Argument, cells: Cells, index: Array, program: Array
    ) -> None:
        tracking = arg.tracking
        assert tracking is not None
        me = self._column(cells, program)
        writer = self._lookup(arg, arg.track(tracking.writer), cells)[index]
        self._race(site, arg, index, program, writer, (writer > 0) & (writer != me),
                   "updates atomically what {who} wrote plainly")  # fmt: skip
        if tracking.first_reader is not None and tracking.last_reader is not None:
            for array in (tracking.first_reader, tracking.last_reader):
                reader = self._lookup(arg, arg.track(array), cells)[index]
                self._race(site, arg, index, program, reader, (reader != 0) & (reader != me),
                           "updates atomically what {who} reads plainly")  # fmt: skip
        view = self._lookup(arg, arg.track(tracking.atomics()), cells)
        seen = view[index]
        view[index] = np.where((seen == 0) | (seen == me), me, np.int32(MANY))
        after = view[index]
        if (after != me).any():
            view[index] = np.where(after != me, np.int32(MANY), after)


class Order:
    """Which programs are known to precede which: an atomic's result orders its users.

    A program that reads the result of an atomic comes after all that changed the same address before.
    What those did after their own atomic is taken to be ordered as well, so a race there is missed;
    the alternative is to call every lock a race.
    """

    def __init__(self) -> None:
        """Know of no order."""
        self.known = False
        self._address: dict[tuple[int, int], int] = {}
        self._before: dict[int, int] = {}

    def through(self, key: int, index: Array, program: Array) -> None:
        """Programs (numbers from 1) did an atomic on scalar addresses, in this order."""
        self.known = True
        for at, who in zip(index.tolist(), program.tolist(), strict=True):
            earlier = self._address.get((key, at), 0)
            mine = self._before.get(who, 0) | earlier
            self._before[who] = mine
            self._address[(key, at)] = earlier | mine | (1 << who)

    def precedes(self, earlier: Array, later: Array) -> Array:
        """Elementwise: is `earlier` known to come before `later`? (later: one entry a row)."""
        rows = later.reshape((-1,) + (1,) * (earlier.ndim - 1))
        pairs = np.stack([earlier.ravel(), np.broadcast_to(rows, earlier.shape).ravel()])
        unique, inverse = np.unique(pairs, axis=1, return_inverse=True)
        known = [a > 0 and bool(self._before.get(b, 0) >> a & 1) for a, b in unique.T.tolist()]
        return np.array(known, np.bool_)[inverse.reshape(-1)].reshape(earlier.shape)


def _rounds(index: Array, program: Array, cells: Cells) -> list[Any]:
    """Split flattened cells into parts without repetition that keep each address's lane order."""
    apart = cells.length if cells.axis is not None else 1
    if index.size == 1:
        return [slice(None)]
    order = np.argsort(index, kind="stable")
    gaps = np.diff(index[order])
    if (gaps >= apart).all():
        return [slice(None)]
    if cells.axis is not None:  # windows may overlap partly: go program by program, or run by run
        parts = []
        for who in _unique_in_order(program):
            rows = np.flatnonzero(program == who)
            mine = np.sort(index[rows])
            clean = (np.diff(mine) >= apart).all()
            parts += [rows] if clean else [np.array([r]) for r in rows]
        return parts
    starts = np.concatenate([[True], gaps != 0])
    group = np.maximum.accumulate(np.where(starts, np.arange(index.size), 0))
    rank = np.empty(index.size, np.int64)
    rank[order] = np.arange(index.size) - group
    by_rank = np.argsort(rank, kind="stable")
    edges = np.flatnonzero(np.diff(rank[by_rank])) + 1
    return np.split(by_rank, edges)


def _unique_in_order(values: Array) -> list[int]:
    return list(dict.fromkeys(values.tolist()))


def _bits(raw: Array) -> Array:
    """Raw elements as something whose equality is equality of bits."""
    if raw.dtype.kind == "f":
        return raw.view(np.int32 if raw.dtype.itemsize == 4 else np.int64)
    return raw


def _reinterpret(arg: Argument, scalar: str) -> Argument:
    """The same argument seen as elements of another type of the same width."""
    if RAW[scalar].itemsize != arg.flat.dtype.itemsize:
        raise Unsupported(f"a pointer to {arg.scalar} used as a pointer to {scalar}")
    seen = copy.copy(arg)
    seen.scalar, seen.flat, seen._windows = scalar, arg.flat.view(RAW[scalar]), {}  # noqa: SLF001
    return seen
