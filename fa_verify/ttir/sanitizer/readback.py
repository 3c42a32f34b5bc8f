"""Notes a program that reads back what it stored itself through another tile, with no barrier.

The threads of a program see each other's stores only after a barrier. Which thread holds which
element TTIR does not say; the same place in a tile of the same shape is taken to be the same
thread's, so that load, add, store in a loop is not noted. A barrier, and an atomic that acquires or
releases, orders the program's threads. Layouts and shared memory may add barriers of their own:
what is noted is possible, not certain.
"""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING

import numpy as np

from fa_verify.ttir.lowering.roots import Aliases

if TYPE_CHECKING:
    from fa_verify.ttir.engine.machine import Machine
    from fa_verify.ttir.memory.cells import Access, Touched
    from fa_verify.ttir.numbers.floats import Array
    from fa_verify.ttir.sanitizer.findings import Findings
    from fa_verify.ttir.syntax.ir import Module

_LOADS = frozenset({"tt.load", "tt.descriptor_load", "tt.descriptor_gather"})
_SHAPES: dict[tuple[int, ...], int] = {}  # a number for each shape of tile
_PLACES = 1 << 32  # more than a tile has elements


class ReadBack:
    """Where in which tile each element was stored from, and when, in one launch."""

    def __init__(self, machine: Machine, findings: Findings) -> None:
        """Nothing was stored yet."""
        self._machine, self._findings = machine, findings
        self._clock = 0
        nx, ny, nz = machine.grid
        self._barriers = np.zeros(nx * ny * nz, np.int64)

    @staticmethod
    def places(access: Access) -> Array:
        """A number for each element of a tile, (1, *tile): its place and the tile's shape."""
        shape = _SHAPES.setdefault(access.shape, len(_SHAPES) + 1)
        places: Array = shape * _PLACES + np.arange(prod(access.shape), dtype=np.int64)
        return places.reshape(1, *access.shape)

    def barrier(self) -> None:
        """The programs that are lanes now wait for all their threads."""
        self._clock += 1
        self._barriers[self._machine.lanes.linear] = self._clock

    def stored(self, touched: Touched, places: Array) -> None:
        """A tile was stored."""
        tracking = touched.arg.tracking
        if tracking is not None:
            self._clock += 1
            place, when = tracking.places()
            touched.of(touched.arg.track(place))[touched.index] = places
            touched.of(touched.arg.track(when))[touched.index] = self._clock

    def loaded(self, touched: Touched, places: Array) -> None:
        """A tile is loaded."""
        tracking = touched.arg.tracking
        if tracking is None or not tracking.stored:
            return
        place, when = (touched.of(touched.arg.track(a))[touched.index] for a in tracking.places())
        mine = touched.of(touched.arg.track(tracking.writer))[touched.index] == touched.me
        wrong = mine & (place != places) & (when > self._barriers[touched.me - 1])
        if wrong.any():
            _, offset, program = touched.first(wrong)
            self._findings.add(
                "read-back", touched.access.site, touched.arg,
                self._machine.position(program - 1), offset, int(np.count_nonzero(wrong)),
                "possible: the program stored this element itself, through another tile or from "
                "another place in it, and no barrier orders its threads",
            )  # fmt: skip


def possible(module: Module) -> bool:
    """Whether some load of a kernel may read what the kernel stores, by the IR."""
    for function in module.functions.values():
        loads = [op.operands[0] for op in function.walk() if op.name in _LOADS]
        if loads:
            aliases = Aliases(function, module)
            if any(aliases.may_be_stored(pointer) for pointer in loads):
                return True
    return False
