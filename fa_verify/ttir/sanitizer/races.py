"""Finds accesses of different programs to one element that nothing orders.

Policy. Reported: two programs, or one store of a program, give an element different values; one
loads what another stores in the same launch, in either order of time; one accesses plainly what
another updates atomically. Not reported: atomics among themselves, and the load whose value a
compare-and-swap checks before anything depends on it (see `lowering.retries`); several programs
that store the same bits; a program that reads what it wrote; accesses ordered by atomics (see
`Order`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from fa_verify.ttir.sanitizer.order import Order
from fa_verify.ttir.sanitizer.tracking import MANY

if TYPE_CHECKING:
    from fa_verify.ttir.engine.machine import Machine
    from fa_verify.ttir.memory.cells import Touched
    from fa_verify.ttir.numbers.floats import Array
    from fa_verify.ttir.sanitizer.findings import Findings
    from fa_verify.ttir.sanitizer.tracking import Tracking


def bits(raw: Array) -> Array:
    """Raw elements as something whose equality is equality of bits."""
    if raw.dtype.kind == "f":
        return raw.view(np.int32 if raw.dtype.itemsize == 4 else np.int64)
    return raw


class Races:
    """Race bookkeeping of one launch: called for each access to a tracked argument."""

    def __init__(self, machine: Machine, findings: Findings) -> None:
        self._machine, self._findings = machine, findings
        nx, ny, nz = machine.grid
        self.order = Order(nx * ny * nz)

    def _report(self, touched: Touched, other: Array, wrong: Array, how: str) -> None:
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
        """(who touched the cells according to `array`, whether unordered and somebody else)."""
        who = touched.of(touched.arg.track(array))[touched.index]
        foreign = (who != 0) & (who != touched.me)
        return who, self._unordered(touched, array, who, foreign)

    def _unordered(self, touched: Touched, array: Array, who: Array, foreign: Array) -> Array:
        if not (self.order.known and foreign.any()):
            return foreign
        epochs = self._tracking(touched).epochs(array)
        epoch = touched.of(touched.arg.track(epochs))[touched.index]
        return self.order.unordered(foreign, who, epoch, touched.me)

    def _set(self, touched: Touched, array: Array, who: Array, *, first: bool = False) -> None:
        """Record that programs touch the cells and in which of their epochs, or who did first."""
        view, index = touched.of(touched.arg.track(array)), touched.index
        old = view[index] if first else None
        view[index] = who if old is None else np.where(old == 0, who, old)
        if self.order.epochs is not None:
            epochs = touched.of(touched.arg.track(self._tracking(touched).epochs(array)))
            epoch = self.order.epochs[touched.me]
            epochs[index] = epoch if old is None else np.where(old == 0, epoch, epochs[index])

    @staticmethod
    def _set_many(touched: Touched, array: Array, where: Array) -> None:
        """Record that several programs touch some of the cells, whatever other lanes recorded."""
        index = touched.index
        if touched.cells.axis is not None:
            index = index[:, None] + np.arange(touched.cells.length)
        touched.arg.track(array)[index[np.broadcast_to(where, index.shape)]] = MANY

    def read(self, touched: Touched) -> None:
        """A plain load."""
        tracking = self._tracking(touched)
        writer, foreign = self._others(touched, tracking.writer)
        self._report(touched, writer, foreign & (writer > 0), "reads what {who} wrote")
        checked = touched.access.checked
        if tracking.atomic is not None and not checked:
            atomic, foreign = self._others(touched, tracking.atomic)
            self._report(touched, atomic, foreign, "reads plainly what {who} updated atomically")
        first, last = tracking.checked_readers() if checked else tracking.readers()
        self._set(touched, last, touched.me)
        self._set(touched, first, touched.me, first=True)

    def write(self, touched: Touched, raw: Array) -> None:
        """A plain store, before it is carried out."""
        tracking = self._tracking(touched)
        writers = touched.of(touched.arg.track(tracking.writer))
        conflict = np.zeros(1, np.bool_)
        found: list[tuple[Array, Array, str]] = []
        if tracking.stored and (before := writers[touched.index]).any():
            conflict = (before != 0) & (before != touched.me)
            conflict = self._unordered(touched, tracking.writer, before, conflict)
            found.append((before, conflict, "overwrites with another value what {who} wrote"))
        if tracking.first_reader is not None and tracking.last_reader is not None:
            readers = (tracking.first_reader, tracking.last_reader)
            found += [(*self._others(touched, r), "writes what {who} read") for r in readers]
        for reader in tracking.checked or ():
            found.append((*self._others(touched, reader), "writes what {who} read"))
        if tracking.atomic is not None:
            atomic, mixed = self._others(touched, tracking.atomic)
            self._report(touched, atomic, mixed, "writes plainly what {who} updated atomically")
        found = [entry for entry in found if entry[1].any()]
        if found:
            changed = bits(touched.of(touched.arg.flat)[touched.index]) != bits(raw)
            for other, wrong, how in found:
                self._report(touched, other, wrong & changed, how)
            conflict = conflict & ~changed  # several wrote the same value, which is harmless
        me = np.where(conflict, np.int32(MANY), touched.me) if conflict.any() else touched.me
        self._set(touched, tracking.writer, me)
        tracking.stored = True

    def collided(self, touched: Touched, raw: Array) -> None:
        """A plain store, after it was carried out: who lost against whom within it."""
        if touched.apart():
            return
        writers = touched.of(touched.arg.track(self._tracking(touched).writer))
        after = writers[touched.index]
        lost = (after != touched.me) & (after != MANY)
        wrong = bits(touched.of(touched.arg.flat)[touched.index]) != bits(raw)
        if wrong.any():
            how = "writes another value than {who} to the same element"
            self._report(touched, after, lost & wrong, how)
            how = "writes several values to the same element at once"
            self._report(touched, after, (after == touched.me) & wrong, how)
        if lost.any():
            self._set_many(touched, self._tracking(touched).writer, lost)

    def atomic(self, touched: Touched, *, acquires: bool, releases: bool) -> None:
        """An atomic update; `acquires` only if the program learns its result."""
        tracking = self._tracking(touched)
        writer, foreign = self._others(touched, tracking.writer)
        how = "updates atomically what {who} wrote plainly"
        self._report(touched, writer, foreign & (writer > 0), how)
        if tracking.first_reader is not None and tracking.last_reader is not None:
            for array in (tracking.first_reader, tracking.last_reader):
                how = "updates atomically what {who} read plainly"
                self._report(touched, *self._others(touched, array), how)
        atomics = tracking.atomics()
        seen, mixed = self._others(touched, atomics)
        me = touched.me
        self._set(touched, atomics, me)
        if acquires or releases:
            at: Array = touched.index + touched.arg.origin
            who = touched.program
            self.order.through(touched.arg.key, at, who, acquires=acquires, releases=releases)
            mixed = self._unordered(touched, atomics, seen, mixed)
        after = touched.of(touched.arg.track(atomics))[touched.index]
        lost = after != me  # to a later lane of this very operation
        if lost.any() and not (acquires and releases):
            mixed = mixed | lost
        if mixed.any():
            self._set_many(touched, atomics, mixed)
