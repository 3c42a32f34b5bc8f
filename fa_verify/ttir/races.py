"""Finds accesses of different programs to one element that nothing orders.

Policy. Reported: two programs store different values to an element; one loads what another stores
in the same launch, in either order of time; one accesses plainly what another updates atomically.
Not reported: atomics among themselves; several programs that store the same bits; a program that
reads what it wrote; accesses ordered by an atomic whose result was read (see `Order`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from fa_verify.ttir.tracking import MANY

if TYPE_CHECKING:
    from fa_verify.ttir.cells import Touched
    from fa_verify.ttir.findings import Findings
    from fa_verify.ttir.floats import Array
    from fa_verify.ttir.machine import Machine
    from fa_verify.ttir.tracking import Tracking


class Order:
    """Which programs are known to precede which: an atomic's result orders its users.

    A program that reads the result of an atomic that acquires comes after all whose atomics on the
    same address released before. What those did after their own atomic is taken to be ordered as
    well, so a race there is missed; the alternative is to call every lock a race.
    """

    def __init__(self) -> None:
        self.known = False
        self._address: dict[tuple[int, int], int] = {}
        self._before: dict[int, int] = {}

    def through(
        self, key: int, index: Array, program: Array, *, acquires: bool, releases: bool
    ) -> None:
        """Programs (numbers from 1) did an atomic on these addresses, in this order."""
        for at, who in zip(index.tolist(), program.tolist(), strict=True):
            mine, held = self._before.get(who, 0), self._address.get((key, at), 0)
            if acquires and held:
                mine = self._before[who] = mine | held
                self.known = True
            if releases:
                self._address[key, at] = held | mine | (1 << who)

    def unordered(self, wrong: Array, earlier: Array, later: Array) -> Array:
        """`wrong` without those whose `earlier` program is known to precede `later`."""
        where = np.nonzero(wrong)
        codes = earlier[where].astype(np.int64) << 32 | np.broadcast_to(later, wrong.shape)[where]
        if codes.size and (codes == codes[0]).all():
            unique, inverse = codes[:1], np.zeros(codes.size, np.int64)
        else:
            unique, inverse = np.unique(codes, return_inverse=True)
        pairs = [(code >> 32, code & 0xFFFFFFFF) for code in unique.tolist()]
        open_ = [a <= 0 or not self._before.get(b, 0) >> a & 1 for a, b in pairs]
        left = np.zeros(wrong.shape, np.bool_)
        left[where] = np.array(open_, np.bool_)[inverse.reshape(-1)]
        return left


def bits(raw: Array) -> Array:
    """Raw elements as something whose equality is equality of bits."""
    if raw.dtype.kind == "f":
        return raw.view(np.int32 if raw.dtype.itemsize == 4 else np.int64)
    return raw


class Races:
    """Race bookkeeping of one launch: called for each access to a tracked argument."""

    def __init__(self, machine: Machine, findings: Findings) -> None:
        self._machine, self._findings = machine, findings
        self.order = Order()

    def _report(self, touched: Touched, other: Array, wrong: Array, how: str) -> None:
        if not wrong.any():
            return
        if self.order.known:
            wrong = self.order.unordered(wrong, other, touched.me)
            if not wrong.any():
                return
        place, offset, program = touched.first(wrong)
        number = int(other[place])
        me = self._machine.position(program - 1)
        who = f"program {self._machine.position(number - 1)}" if number > 0 else "other programs"
        self._findings.add(
            "race", touched.access.site, touched.arg, me, offset, int(np.count_nonzero(wrong)),
            f"program {me} {how.format(who=who)} in the same launch, with nothing to order them",
        )  # fmt: skip

    @staticmethod
    def _tracking(touched: Touched) -> Tracking:
        tracking = touched.arg.tracking
        if tracking is None:
            raise AssertionError(touched.arg.name)
        return tracking

    def _others(self, touched: Touched, array: Array) -> tuple[Array, Array]:
        """(who touched the cells according to `array`, whether that is somebody else)."""
        who = touched.of(touched.arg.track(array))[touched.index]
        return who, (who != 0) & (who != touched.me)

    def read(self, touched: Touched) -> None:
        """A plain load."""
        tracking = self._tracking(touched)
        writer, foreign = self._others(touched, tracking.writer)
        self._report(touched, writer, foreign & (writer > 0), "reads what {who} wrote")
        if tracking.atomic is not None:
            atomic, foreign = self._others(touched, tracking.atomic)
            self._report(touched, atomic, foreign, "reads plainly what {who} updates atomically")
        first, last = tracking.readers()
        touched.of(touched.arg.track(last))[touched.index] = touched.me
        view = touched.of(touched.arg.track(first))
        seen = view[touched.index]
        view[touched.index] = np.where(seen == 0, touched.me, seen)

    def write(self, touched: Touched, raw: Array) -> None:
        """A plain store, before it is carried out."""
        tracking = self._tracking(touched)
        writers = touched.of(touched.arg.track(tracking.writer))
        conflict = np.zeros(1, np.bool_)
        found: list[tuple[Array, Array, str]] = []
        if tracking.stored and (before := writers[touched.index]).any():
            conflict = (before != 0) & (before != touched.me)
            if self.order.known and conflict.any():
                conflict = self.order.unordered(conflict, before, touched.me)
            found.append((before, conflict, "overwrites with another value what {who} wrote"))
        if tracking.first_reader is not None and tracking.last_reader is not None:
            readers = (tracking.first_reader, tracking.last_reader)
            found += [(*self._others(touched, r), "writes what {who} read") for r in readers]
        if tracking.atomic is not None:
            atomic, mixed = self._others(touched, tracking.atomic)
            self._report(touched, atomic, mixed, "writes plainly what {who} updates atomically")
        found = [entry for entry in found if entry[1].any()]
        if found:
            changed = bits(touched.of(touched.arg.flat)[touched.index]) != bits(raw)
            for other, wrong, how in found:
                self._report(touched, other, wrong & changed, how)
            conflict = conflict & ~changed  # several wrote the same value, which is harmless
        me = np.where(conflict, np.int32(MANY), touched.me) if conflict.any() else touched.me
        writers[touched.index] = me
        tracking.stored = True

    def collided(self, touched: Touched, raw: Array) -> None:
        """A plain store, after it was carried out: who lost against whom within it."""
        if touched.apart():
            return
        writers = touched.of(touched.arg.track(self._tracking(touched).writer))
        after = writers[touched.index]
        lost = (after != touched.me) & (after != MANY)
        if lost.any():
            now = touched.of(touched.arg.flat)[touched.index]
            wrong = lost & (bits(now) != bits(raw))
            self._report(
                touched, after, wrong, "writes another value than {who} to the same element"
            )
            writers[touched.index] = np.where(lost, np.int32(MANY), writers[touched.index])

    def atomic(self, touched: Touched, *, acquires: bool, releases: bool) -> None:
        """An atomic update; `acquires` only if the program learns its result."""
        tracking = self._tracking(touched)
        writer, foreign = self._others(touched, tracking.writer)
        how = "updates atomically what {who} wrote plainly"
        self._report(touched, writer, foreign & (writer > 0), how)
        if tracking.first_reader is not None and tracking.last_reader is not None:
            for array in (tracking.first_reader, tracking.last_reader):
                how = "updates atomically what {who} reads plainly"
                self._report(touched, *self._others(touched, array), how)
        view = touched.of(touched.arg.track(tracking.atomics()))
        seen, me = view[touched.index], touched.me
        view[touched.index] = np.where((seen == 0) | (seen == me), me, np.int32(MANY))
        after = view[touched.index]
        if (after != me).any():  # within this very operation
            view[touched.index] = np.where(after != me, np.int32(MANY), after)
        if acquires or releases:
            at: Array = touched.index + touched.arg.origin
            who = touched.program
            self.order.through(touched.arg.key, at, who, acquires=acquires, releases=releases)
