"""Carries out loads, stores and atomics through pointers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from fa_verify.ttir.memory.cells import elementwise, outside, rounds
from fa_verify.ttir.memory.reach import Reach
from fa_verify.ttir.memory.tiles import by_run, load_window
from fa_verify.ttir.memory.values import conjunction
from fa_verify.ttir.numbers.floats import CARRIER, SHORT, Array, decode, encode

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from fa_verify.ttir.memory.argument import Argument
    from fa_verify.ttir.memory.cells import Access, Touched
    from fa_verify.ttir.memory.values import Pointer, Terms


@dataclass(frozen=True, slots=True, eq=False)
class Update:
    """What an atomic operation does to a cell.

    Attributes:
        function: (old, *operands) -> new; None: the cell is only read.
        reads: Whether what it was before matters: an exchange of which nobody looks at that does
            not read.
        used: Whether anybody looks at what was there before.
        acquires: Whether later accesses of the program come after what was released here.
        releases: Whether earlier accesses of the program come before whoever acquires here.
    """

    function: Callable[..., Array] | None
    reads: bool
    used: bool
    acquires: bool
    releases: bool


class Accesses(Reach):
    """Memory operations of one launch."""

    def load(self, access: Access, pointer: Pointer, masks: Terms, other: Array | None) -> Array:
        """Load a tile; masked-off lanes get `other` (0 when None, as NVIDIA's code leaves them)."""
        result: Array | None = None
        if access.short and other is not None:
            other = encode(np.ascontiguousarray(other), access.scalar)
        for arg, mine in self.parts(access, pointer):
            guarded = masks if mine is None else (*masks, mine)
            part = self._load(access, arg, pointer.terms, guarded, other)
            result = part if result is None or mine is None else np.where(mine, part, result)
        if result is None:
            raise AssertionError(access)
        return result.view(SHORT[access.scalar]) if access.short else result

    def _load(
        self, access: Access, arg: Argument, terms: Terms, masks: Terms, other: Array | None
    ) -> Array:
        found = self.planner.windows(terms, masks, access.shape)
        halves = None if found else self.halves(access, terms, masks, other, ordered=False)
        if halves:
            tile = np.empty((self.machine.lanes.linear.size, *access.shape), access.carrier)
            for chosen, (some_terms, some_masks, some_other) in halves:
                tile[chosen] = self._load(access, arg, some_terms, some_masks, some_other)
            return tile
        cells = self.resolve(access, arg, (terms, masks), "out-of-bounds-read", found)
        if self.sanitize:
            if arg.shadow is not None:
                self.check_written(access, arg, cells, arg.shadow)
            if self.reading is not None:
                self.reading.read(access, arg, cells, self.machine)
            if arg.tracking is not None and arg.size and cells.length:
                self.look_at_read(access, arg, cells)
        turns = self.machine.turns
        if turns is not None and turns.watching and arg.size and cells.length:
            turns.saw(self.touch(access, arg, cells)[0])
        fill = np.zeros((), access.carrier) if other is None else other
        if cells.axis is not None:
            # In one order of memory, however it was loaded: the sums of BLAS depend on it.
            return np.ascontiguousarray(load_window(access, arg, cells, fill))
        if arg.size:
            values = access.decode(arg.flat.take(cells.index, mode="clip"))
        else:
            values = np.full(cells.index.shape, access.poison, access.carrier)
        if cells.valid is None:
            return values
        legal = np.where(cells.valid, values, access.poison)
        return np.where(conjunction(masks), legal, fill) if masks else legal

    def store(self, access: Access, pointer: Pointer, values: Array, masks: Terms) -> None:
        """Store a tile; lanes of later programs win where programs collide."""
        for arg, mine in self.parts(access, pointer):
            guarded = masks if mine is None else (*masks, mine)
            self._store(access, arg, pointer.terms, guarded, values)

    def _store(
        self, access: Access, arg: Argument, terms: Terms, masks: Terms, values: Array
    ) -> None:
        found = self.planner.windows(terms, masks, access.shape)
        halves = None if found else self.halves(access, terms, masks, values, ordered=True)
        if halves:
            for _, (some_terms, some_masks, some_values) in halves:
                self._store(access, arg, some_terms, some_masks, some_values)
            return
        cells = self.resolve(access, arg, (terms, masks), "out-of-bounds-write", found)
        if cells.length == 0 or arg.size == 0:
            return
        watched = self.sanitize and arg.tracking is not None
        places = self.places(access, cells) if watched else []
        touched, (chosen, *places) = self.touch(
            access, arg, cells, by_run(access, cells, values), *places, everyone=watched
        )
        if touched.index.size == 0:
            return
        raw = encode(np.ascontiguousarray(chosen), access.scalar)
        if watched:
            self.races.write(touched, raw)
            if self.reading is not None:
                self.reading.write(access, arg, cells, self.machine)
        if self.sanitize and chosen.dtype.kind in "fV":
            self.look_for_nan(access, touched, chosen)
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
        for arg, mine in self.parts(access, pointer):
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
        cells = self.resolve(access, arg, (terms, masks), kind, found)
        if used and cells.axis is not None:  # results go back to lanes one by one
            cells = elementwise(terms, masks)
            bad = outside(arg, cells)
            if bad is not None:
                cells.valid = ~bad if cells.valid is None else cells.valid & ~bad
                cells.index = np.where(bad, 0, cells.index)
        spread = [by_run(access, cells, x) for x in operands]
        if cells.axis is None:  # every lane counts, even if all agree on the address
            cells.index = np.broadcast_to(cells.index, (cells.index.shape[0], *access.shape))
        if update.reads and self.sanitize and arg.shadow is not None:
            self.check_written(access, arg, cells, arg.shadow)
        touched, chosen = self.touch(access, arg, cells, *spread, everyone=True)
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
                self.look_for_nan(access, touched, chosen[0])
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
