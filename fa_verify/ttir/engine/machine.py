"""The state a lowered kernel runs against: its launch, and which programs are lanes now."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from fa_verify.ttir.errors import TimeLimit

if TYPE_CHECKING:
    from fa_verify.ttir.engine.coverage import Coverage
    from fa_verify.ttir.engine.turns import Turns
    from fa_verify.ttir.memory.access import Accesses
    from fa_verify.ttir.memory.addresses import Addresses
    from fa_verify.ttir.memory.values import Selection
    from fa_verify.ttir.numbers.floats import Array


@dataclass(slots=True, eq=False)
class Lanes:
    """The programs run in lockstep: linear number and position, int32, one entry a lane.

    A coordinate that all lanes share has a single entry.
    """

    linear: Array
    x: Array
    y: Array
    z: Array

    @classmethod
    def of(cls, linear: Array, grid: tuple[int, int, int]) -> Lanes:
        """Lanes for the given linear program numbers (x fastest)."""
        x = linear % grid[0]
        rest = linear // grid[0]
        return cls(linear, _shared(x), _shared(rest % grid[1]), _shared(rest // grid[1]))

    def take(self, selection: Selection) -> Lanes:
        """Keep some lanes."""
        keep = [a if a.shape[0] == 1 else a[selection] for a in (self.x, self.y, self.z)]
        return Lanes(self.linear[selection], *keep)


def _shared(values: Array) -> Array:
    same = values.size == 0 or (values == values[0]).all()
    return values[:1] if same else values


class Machine:
    """What closures look at while they run. One launch at a time."""

    __slots__ = ("accesses", "addresses", "coverage", "deadline", "grid", "lanes", "turns")

    def __init__(self) -> None:
        """Hold nothing until a launch begins."""
        self.lanes = Lanes.of(np.zeros(1, np.int32), (1, 1, 1))
        self.grid = (1, 1, 1)
        self.deadline: float | None = None
        self.turns: Turns | None = None  # when programs take turns instead of running in lockstep
        self.coverage: Coverage
        self.accesses: Accesses
        self.addresses: Addresses

    def position(self, linear: int) -> tuple[int, int, int]:
        """Coordinates of a program in the grid."""
        nx, ny, _ = self.grid
        return (linear % nx, linear // nx % ny, linear // (nx * ny))

    def check(self) -> None:
        """Raise TimeLimit once the deadline has passed."""
        if self.deadline is not None and time.thread_time() > self.deadline:
            msg = "the deadline passed while a kernel was running"
            raise TimeLimit(msg)
