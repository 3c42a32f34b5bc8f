"""Which accesses of which programs are known to precede a program, through atomics.

An atomic that releases ends an epoch of its program; one that acquires, and whose result the
program looks at, learns all that was released at that address so far, and all that those who
released it had learned (the release sequences and happens-before of C++, in vector clocks). An
access precedes a program that has learned of a release after it.
"""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from fa_verify.ttir.numbers.floats import Array


class Order:
    """The releases of one launch, numbered, and who knows of which (sets of bits).

    Attributes:
        known: Whether any program learned anything.
        epochs: By program + 1: how many releases it has done; None before the first.
    """

    def __init__(self, programs: int) -> None:
        """Nobody knows anything."""
        self.known = False
        self.epochs: Array | None = None
        self._programs = programs
        self._count = 0
        self._releases: dict[int, list[int]] = defaultdict(list)
        self._held: dict[tuple[int, int], int] = defaultdict(int)
        self._learned: dict[int, int] = defaultdict(int)

    def through(
        self, key: int, index: Array, program: Array, *, acquires: bool, releases: bool
    ) -> None:
        """Programs (numbers from 1) did an atomic on these addresses, in this order."""
        if releases and self.epochs is None:
            self.epochs = np.zeros(self._programs + 1, np.int32)
        for at, who in zip(index.tolist(), program.tolist(), strict=True):
            held = self._held[key, at]
            if acquires and held:
                self._learned[who] |= held
                self.known = True
            if releases and self.epochs is not None:
                self._learned[who] |= 1 << self._count
                self._held[key, at] = held | self._learned[who]
                self._releases[who].append(self._count)
                self._count += 1
                self.epochs[who] += 1

    def unordered(self, wrong: Array, earlier: Array, epoch: Array, later: Array) -> Array:
        """`wrong` without those whose access by `earlier` in `epoch` precedes program `later`."""
        where = np.nonzero(wrong)
        epoch, later = (np.broadcast_to(x, wrong.shape)[where] for x in (epoch, later))
        earlier = earlier[where].astype(np.int64)
        # As one number: rows of three take 20 times as long to sort. A million programs with a
        # million releases each, more than bits can be kept of, stay below 2^63.
        triples = (earlier * (int(epoch.max()) + 1) + epoch) * (int(later.max()) + 1) + later
        _, first, inverse = np.unique(triples, return_index=True, return_inverse=True)
        unique = zip(*(x[first].tolist() for x in (earlier, epoch, later)), strict=True)
        open_ = [not self._precedes(*triple) for triple in unique]
        left = np.zeros(wrong.shape, np.bool_)
        left[where] = np.array(open_, np.bool_)[inverse.reshape(-1)]
        return left

    def _precedes(self, earlier: int, epoch: int, later: int) -> bool:
        ends = self._releases.get(earlier, ())
        return epoch < len(ends) and bool(self._learned.get(later, 0) >> ends[epoch] & 1)
