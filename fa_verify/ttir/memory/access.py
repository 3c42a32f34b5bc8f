"""Carries out loads, stores and atomics through pointers, and looks at each for mistakes."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from fa_verify.ttir.engine.control import selection
from fa_verify.ttir.errors import Unsupported
from fa_verify.ttir.memory.cells import (
    Cells,
    Planner,
    Touched,
    differs,
    elementwise,
    outside,
    rounds,
)
from fa_verify.ttir.memory.values import Pointer, conjunction, take
from fa_verify.ttir.numbers.floats import CARRIER, RAW, Array, decode, encode, poison
from fa_verify.ttir.sanitizer.races import Races
from fa_verify.ttir.sanitizer.reports import Reports

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from fa_verify.ttir.engine.machine import Machine
    from fa_verify.ttir.memory.argument import Argument
    from fa_verify.ttir.memory.cells import Access
    from fa_verify.ttir.memory.values import Selection, Terms
    from fa_verify.ttir.sanitizer.findings import Findings, Site
    from fa_verify.ttir.sanitizer.readback import ReadBack
    from fa_verify.ttir.sanitizer.regions import Reading


@dataclass(frozen=True, slots=True, eq=False)
class Update:
    """What an atomic operation does to a cell.

    Attributes:
        function: (old, *operands) -> new; None: the cell is only read.
        used: Whether anybody looks at what was there before.
        acquires: Whether later accesses of the program come after what was released here.
        releases: Whether earlier accesses of the program come before whoever acquires here.
    """

    function: Callable[..., Array] | None
    used: bool
    acquires: bool
    releases: bool


Line = tuple[str, int]  # a file and a line in it


@dataclass(slots=True, eq=False)
class Wrap:
    """32-bit arithmetic of one line that wrapped: the first program, the exact value, how often."""

    site: Site
    program_id: tuple[int, int, int]
    value: int
    count: int


class Accesses:
    """Memory operations of one launch."""

    def __init__(self, machine: Machine, findings: Findings, *, sanitize: bool) -> None:
        """Work for `machine`, reporting to `findings` when `sanitize`."""
        self.machine, self.sanitize = machine, sanitize
        self.planner = Planner()
        self.findings = findings
        self.races = Races(machine, findings)
        self.reports = Reports(machine, findings)
        self.reading: Reading | None = None
        self.read_back: ReadBack | None = None
        self.watch_wraps = sanitize
        self.wraps: dict[Line, Wrap] = {}
        self.nans: dict[int, dict[int, tuple[Argument, int]]] = {}  # by operation and program

    # -- which cells
    def _halves(
        self, access: Access, terms: Terms, masks: Terms, *values: Any, ordered: bool
    ) -> Iterator[tuple[Selection, list[Any]]] | None:
        """Programs that see their whole tile, then the others, where this makes windows of a tile.

        Yields the programs, and their terms, masks and values. While one half is being dealt with,
        only its programs are lanes.

        Args:
            access: The operation.
            terms: Addresses.
            masks: Masks.
            values: Whatever else there is a row of for each program, or one for all.
            ordered: Only if programs then still come in order.
        """
        whole = self.planner.whole(masks)
        rest = tuple([m for m in masks if not differs(m)])
        if whole is None or self.planner.windows(terms, rest, access.shape) is None:
            return None
        if ordered and np.count_nonzero(whole[1:] != whole[:-1]) > 1:
            return None
        return self._in_turns(whole, rest, terms, masks, values)

    def _in_turns(
        self, whole: Array, rest: Terms, terms: Terms, masks: Terms, values: Sequence[Any]
    ) -> Iterator[tuple[Selection, list[Any]]]:
        lanes = self.machine.lanes
        halves = [
            (selection(keep), m) for keep, m in ((whole, rest), (~whole, masks)) if keep.any()
        ]
        if not whole[0]:
            halves.reverse()
        for chosen, left in halves:
            self.machine.lanes = lanes.take(chosen)
            yield chosen, [take(x, chosen) for x in (terms, left, *values)]
            self.machine.lanes = lanes

    def _resolve(
        self, access: Access, arg: Argument, addresses: tuple[Terms, Terms], kind: str,
        found: Cells | None,
    ) -> Cells:  # fmt: skip
        """Describe a tile's legal cells; whatever lies outside is reported and masked off.

        `found` is the tile as windows, if it can be described so. The result's `index` is safe to
        use as it is: masked-off entries are moved inside.
        """
        terms, masks = addresses
        cells = found or elementwise(terms, masks)
        if access.sides is not None:
            self._note_sides(access.sides, cells)
        bad = outside(arg, cells)
        if bad is None:
            return cells
        wrong = bad if cells.valid is None else bad & cells.valid
        if cells.axis is not None and wrong.any():  # look again, element by element
            cells = elementwise(terms, masks)
            bad = outside(arg, cells)
            if bad is None:
                return cells
            wrong = bad if cells.valid is None else bad & cells.valid
        if wrong.any():
            if self.sanitize:
                self.reports.outside(access, arg, cells, wrong, kind)
            cells.valid = ~bad if cells.valid is None else cells.valid & ~bad
        cells.index = np.where(bad, 0, cells.index)
        if cells.axis is not None and arg.size < cells.length:
            cells.length = 0
        return cells

    def _note_sides(self, sides: tuple[int, int], cells: Cells) -> None:
        """Remember what a mask has done."""
        flags, valid, (shown, hidden) = self.machine.coverage.flags, cells.valid, sides
        if not flags[hidden] and (valid is not None or cells.length < cells.full):
            flags[hidden] = 1
        if not flags[shown] and cells.length and (valid is None or valid.any()):
            flags[shown] = 1

    def _touch(
        self, access: Access, arg: Argument, cells: Cells, *others: Array, everyone: bool = False
    ) -> tuple[Touched, list[Array]]:
        """Flatten the valid cells, and `others`, arrays shaped like cells.index (+ the run).

        Args:
            access: The operation.
            arg: The argument.
            cells: Legal cells.
            others: What belongs to each cell.
            everyone: Count an access that is the same for all programs once for each of them.
        """
        index, valid = cells.index, cells.valid
        shapes = [index.shape, *[o.shape[: index.ndim] for o in others]]
        if valid is None and not everyone and all(shape == index.shape for shape in shapes):
            program = self.machine.lanes.linear[: index.shape[0]] + np.int32(1)
            program = program.repeat(index.size // program.size)
            tails = [o.reshape((-1, *o.shape[index.ndim :])) for o in others]
            return Touched(access, arg, cells, index.reshape(-1), program), tails
        if valid is not None:
            shapes.append(valid.shape)
        lanes = self.machine.lanes.linear
        if everyone:
            shapes.append((lanes.size, *(1,) * (index.ndim - 1)))
        shape = np.broadcast_shapes(*shapes)
        program = (lanes + np.int32(1))[: shape[0]]
        program = np.broadcast_to(program.reshape((-1,) + (1,) * (len(shape) - 1)), shape)
        spread = [np.broadcast_to(o, shape + o.shape[index.ndim :]) for o in others]
        index = np.broadcast_to(index, shape)
        if valid is None:
            tails = [o.reshape((-1, *o.shape[len(shape) :])) for o in spread]
            return Touched(access, arg, cells, index.reshape(-1), program.reshape(-1)), tails
        valid = np.broadcast_to(valid, shape)
        return Touched(access, arg, cells, index[valid], program[valid]), [o[valid] for o in spread]

    def _check_written(self, access: Access, arg: Argument, cells: Cells, shadow: Array) -> None:
        """Report reads of elements that nobody wrote."""
        if cells.index.size == 0 or cells.length == 0:
            return
        written = cells.of(arg, shadow)[cells.index]
        if written.all():
            return
        touched, (written,) = self._touch(access, arg, cells, written)
        missing = ~written
        if missing.any():
            self.reports.unwritten(touched, missing)

    def _places(self, access: Access, cells: Cells) -> list[Array]:
        """Places in the tile, if it matters where an element was stored from."""
        if self.read_back is None:
            return []
        return [_by_run(access, cells, self.read_back.places(access))]

    def _look_at_read(self, access: Access, arg: Argument, cells: Cells) -> None:
        places = self._places(access, cells)
        touched, places = self._touch(access, arg, cells, *places, everyone=True)
        self.races.read(touched)
        if self.read_back is not None:
            self.read_back.loaded(touched, places[0])

    def _look_for_nan(self, access: Access, touched: Touched, values: Array) -> None:
        """Remember the first NaN that each program stores by an operation."""
        if not np.isnan(values.min()):
            return
        seen = self.nans.setdefault(id(access), {})
        nan = np.isnan(values.reshape(values.shape[0], -1))
        runs = np.flatnonzero(nan.any(axis=1))
        programs, first = np.unique(touched.program[runs], return_index=True)
        for i in np.argsort(first):
            run = runs[first[i]]
            offset = int(touched.index[run] + np.argmax(nan[run]))
            seen.setdefault(int(programs[i]) - 1, (touched.arg, offset))

    @staticmethod
    def _parts(access: Access, pointer: Pointer) -> Iterator[tuple[Argument, Array | None]]:
        """The arguments a pointer points into, each with the lanes that do (None: all)."""
        for number, arg in enumerate(pointer.args):
            seen = arg if arg.scalar == access.scalar else _reinterpret(arg, access.scalar)
            if pointer.which is None:
                yield seen, None
            elif (mine := pointer.which == number).any():
                yield seen, mine

    def wrapped(self, site: Site, exact: Array, wrong: Array, result: Array) -> Array:
        """Remember that arithmetic for addresses wrapped where `wrong`; return its result."""
        lane = np.unravel_index(int(np.argmax(wrong)), wrong.shape)
        program = self.machine.position(int(self.machine.lanes.linear[int(lane[0])]))
        found = self.wraps.setdefault(
            (site.file, site.line), Wrap(site, program, int(exact[lane]), 0)
        )
        found.count += int(np.count_nonzero(wrong))
        self.findings.noted += 1  # nothing that depends on it may be taken from an earlier launch
        return result

    # -- load
    def load(self, access: Access, pointer: Pointer, masks: Terms, other: Array | None) -> Array:
        """Load a tile; masked-off lanes get `other` (0 when None, as NVIDIA's code leaves them)."""
        result: Array | None = None
        for arg, mine in self._parts(access, pointer):
            guarded = masks if mine is None else (*masks, mine)
            part = self._load(access, arg, pointer.terms, guarded, other)
            result = part if result is None or mine is None else np.where(mine, part, result)
        if result is None:
            raise AssertionError(access)
        return result

    def _load(
        self, access: Access, arg: Argument, terms: Terms, masks: Terms, other: Array | None
    ) -> Array:
        scalar = access.scalar
        found = self.planner.windows(terms, masks, access.shape)
        halves = None if found else self._halves(access, terms, masks, other, ordered=False)
        if halves:
            tile = np.empty((self.machine.lanes.linear.size, *access.shape), CARRIER[scalar])
            for chosen, (some_terms, some_masks, some_other) in halves:
                tile[chosen] = self._load(access, arg, some_terms, some_masks, some_other)
            return tile
        cells = self._resolve(access, arg, (terms, masks), "out-of-bounds-read", found)
        if self.sanitize:
            if arg.shadow is not None:
                self._check_written(access, arg, cells, arg.shadow)
            if self.reading is not None:
                self.reading.read(access, arg, cells, self.machine)
            if arg.tracking is not None and arg.size and cells.length:
                self._look_at_read(access, arg, cells)
        turns = self.machine.turns
        if turns is not None and turns.watching and arg.size and cells.length:
            turns.saw(self._touch(access, arg, cells)[0])
        carrier = CARRIER[scalar]
        fill = np.asarray(carrier.type(0)) if other is None else other
        if cells.axis is not None:
            # In one order of memory, however it was loaded: the sums of BLAS depend on it.
            return np.ascontiguousarray(_load_window(access, arg, cells, fill))
        if arg.size:
            values = decode(arg.flat.take(cells.index, mode="clip"), scalar)
        else:
            values = np.full(cells.index.shape, poison(scalar), carrier)
        if cells.valid is None:
            return values
        legal = np.where(cells.valid, values, poison(scalar))
        return np.where(conjunction(masks), legal, fill) if masks else legal

    # -- store
    def store(self, access: Access, pointer: Pointer, values: Array, masks: Terms) -> None:
        """Store a tile; lanes of later programs win where programs collide."""
        for arg, mine in self._parts(access, pointer):
            guarded = masks if mine is None else (*masks, mine)
            self._store(access, arg, pointer.terms, guarded, values)

    def _store(
        self, access: Access, arg: Argument, terms: Terms, masks: Terms, values: Array
    ) -> None:
        found = self.planner.windows(terms, masks, access.shape)
        halves = None if found else self._halves(access, terms, masks, values, ordered=True)
        if halves:
            for _, (some_terms, some_masks, some_values) in halves:
                self._store(access, arg, some_terms, some_masks, some_values)
            return
        cells = self._resolve(access, arg, (terms, masks), "out-of-bounds-write", found)
        if cells.length == 0 or arg.size == 0:
            return
        watched = self.sanitize and arg.tracking is not None
        places = self._places(access, cells) if watched else []
        touched, (chosen, *places) = self._touch(
            access, arg, cells, _by_run(access, cells, values), *places, everyone=watched
        )
        if touched.index.size == 0:
            return
        raw = encode(np.ascontiguousarray(chosen), access.scalar)
        if watched:
            self.races.write(touched, raw)
            if self.reading is not None:
                self.reading.write(access, arg, cells, self.machine)
        if self.sanitize and chosen.dtype.kind == "f":
            self._look_for_nan(access, touched, chosen)
        flat, turns = cells.of(arg, arg.flat), self.machine.turns
        before = None if turns is None else flat[touched.index]
        flat[touched.index] = raw
        if turns is not None and before is not None:
            turns.changed(touched, before)
        if arg.shadow is not None:
            cells.of(arg, arg.shadow)[touched.index] = True
        if watched:
            self.races.collided(touched, raw)
        if self.read_back is not None and places:
            self.read_back.stored(touched, places[0])

    # -- atomics
    def atomic(
        self,
        access: Access,
        pointer: Pointer,
        masks: Terms,
        operands: Sequence[Array],
        update: Update,
    ) -> Array:
        """Read, update and write each cell in lane order; return what was there before."""
        result: Array | None = None
        for arg, mine in self._parts(access, pointer):
            guarded = masks if mine is None else (*masks, mine)
            part = self._atomic(access, arg, pointer.terms, guarded, (update, operands))
            result = part if result is None or mine is None else np.where(mine, part, result)
        if result is None:
            raise AssertionError(access)
        return result

    def _atomic(
        self,
        access: Access,
        arg: Argument,
        terms: Terms,
        masks: Terms,
        request: tuple[Update, Sequence[Array]],
    ) -> Array:
        update, operands = request
        used = update.used
        kind = "out-of-bounds-read" if update.function is None else "out-of-bounds-write"
        found = self.planner.windows(terms, masks, access.shape)
        cells = self._resolve(access, arg, (terms, masks), kind, found)
        if used and cells.axis is not None:  # results go back to lanes one by one
            cells = elementwise(terms, masks)
            bad = outside(arg, cells)
            if bad is not None:
                cells.valid = ~bad if cells.valid is None else cells.valid & ~bad
                cells.index = np.where(bad, 0, cells.index)
        spread = [_by_run(access, cells, x) for x in operands]
        if cells.axis is None:  # every lane counts, even if all agree on the address
            cells.index = np.broadcast_to(cells.index, (cells.index.shape[0], *access.shape))
        if update.function is None and self.sanitize and arg.shadow is not None:
            self._check_written(access, arg, cells, arg.shadow)
        touched, chosen = self._touch(access, arg, cells, *spread, everyone=True)
        before = np.zeros(touched.index.shape, CARRIER[access.scalar])
        if touched.index.size and cells.length and arg.size:
            turns = self.machine.turns
            if self.sanitize and arg.tracking is not None:
                orders = turns is not None or not access.shape  # a tile of locks would be slow
                self.races.atomic(
                    touched,
                    acquires=orders and update.acquires and used,
                    releases=orders and update.releases,
                )
                if self.read_back is not None and orders and (update.acquires or update.releases):
                    self.read_back.barrier()
            if self.sanitize and chosen and chosen[0].dtype.kind == "f":
                self._look_for_nan(access, touched, chosen[0])
            held = None if turns is None else touched.of(arg.flat)[touched.index]
            before = _carry_out(touched, update, chosen, before)
            if turns is not None and held is not None:
                turns.did_atomic(touched, held)
        if not used:
            return before
        full = np.zeros((self.machine.lanes.linear.size, *access.shape), before.dtype)
        if cells.valid is None:
            return before.reshape(full.shape)
        full[np.broadcast_to(cells.valid, full.shape)] = before
        return full


def _carry_out(touched: Touched, update: Update, operands: list[Array], before: Array) -> Array:
    """Do an atomic operation on legal cells; return what was there, in `before` or anew."""
    arg, scalar = touched.arg, touched.access.scalar
    view = touched.of(arg.flat)
    if update.function is None:
        return decode(view[touched.index], scalar)
    for part in rounds(touched):
        where = touched.index[part]
        old = decode(view[where], scalar)
        new = update.function(old, *[x[part] for x in operands])
        view[where] = encode(np.ascontiguousarray(new), scalar)
        if update.used:
            before[part] = old
    if arg.shadow is not None:
        touched.of(arg.shadow)[touched.index] = True
    return before


def _by_run(access: Access, cells: Cells, values: Array) -> Array:
    """A tile of values, spread out, with the runs along the last axis."""
    spread = values
    if values.shape[1:] != access.shape:
        spread = np.broadcast_to(values, (values.shape[0], *access.shape))
    if cells.axis is None:
        return spread
    if cells.axis != len(access.shape) - 1:
        spread = np.moveaxis(spread, cells.axis + 1, -1)
    return spread if cells.length == cells.full else spread[..., : cells.length]


def _load_window(access: Access, arg: Argument, cells: Cells, fill: Any) -> Array:
    axis, carrier, rank = cells.axis or 0, CARRIER[access.scalar], len(access.shape)
    index, valid = cells.index, cells.valid
    first_fill = fill if fill.ndim == 0 else fill.reshape(-1)[0]
    shape = index.shape
    if valid is None and 0 < cells.length == cells.full:
        values = decode(arg.window(arg.flat, cells.length)[index], access.scalar)
    else:
        if valid is not None:
            shape = np.broadcast_shapes(valid.shape, shape)
        values = np.empty((*shape, cells.full), carrier)
        values[...] = first_fill
        if cells.length:
            where: Any = ...
            if valid is not None:  # masked-off runs are not even looked at
                where = np.broadcast_to(valid, shape)
                index = np.broadcast_to(index, shape)[where]
            runs = decode(arg.window(arg.flat, cells.length)[index], access.scalar)
            values[where, : cells.length] = runs
    if axis != rank - 1:
        values = np.moveaxis(values, -1, axis + 1)
    if fill.size == 1:
        return values
    keep = np.ones(1, np.bool_) if valid is None else np.expand_dims(valid, axis + 1)
    inside = np.arange(cells.full) < cells.length
    keep = keep & inside.reshape([-1 if d == axis + 1 else 1 for d in range(rank + 1)])
    return np.where(keep, values, fill)


def _reinterpret(arg: Argument, scalar: str) -> Argument:
    """The same argument seen as elements of another type of the same width."""
    if RAW[scalar].itemsize != arg.flat.dtype.itemsize:
        msg = f"a pointer to {arg.scalar} used as a pointer to {scalar}"
        raise Unsupported(msg)
    seen = copy.copy(arg)
    seen.scalar, seen.flat = scalar, arg.flat.view(RAW[scalar])
    seen.forget_windows()
    return seen
