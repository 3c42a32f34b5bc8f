"""Programs that wait for each other, run as coroutines that take turns.

A program gives way after each atomic that changed memory and after each turn of a loop that may
wait for another program (see `waits`). One whose turn changed nothing and carries nothing new into
the next falls asleep until an element it read in that turn changes: before, going round again would
do the same. When all programs left are asleep, none will ever wake.
"""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import greenlet
import numpy as np

from fa_verify.ttir.memory.values import same

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from fa_verify.ttir.engine.machine import Machine
    from fa_verify.ttir.errors import Unsupported
    from fa_verify.ttir.memory.cells import Touched
    from fa_verify.ttir.memory.values import RuntimeValue
    from fa_verify.ttir.numbers.floats import Array
    from fa_verify.ttir.options import Options

# A loop that counts its turns never repeats itself exactly. Such loops are given up after this many
# turns, and this long, in which nothing changed for anybody; 0.5 s are left of the 2 s in which a
# hopeless wait is to end.
_IDLE_TURNS, _IDLE_SECONDS = 5000, 1.5
_WATCHED = 4096  # a wait reads a flag or a few; a turn that reads more is work, and not watched
_PLACE = 3  # log2 of the bytes that are watched as one


@dataclass(slots=True, eq=False)
class Turn:
    """What a loop's turn has read; impure once it need not repeat itself."""

    first: bool = True
    pure: bool = True
    reads: list[tuple[Array, Array, Array]] = field(default_factory=list)  # memory, where, what
    places: set[int] = field(default_factory=set)

    def spoil(self) -> None:
        """Note that this turn need not repeat itself."""
        self.pure = False
        self.reads.clear()
        self.places.clear()

    def repeats(self) -> bool:
        """Whether all that was read is still there."""
        return all(flat[at].tobytes() == was.tobytes() for flat, at, was in self.reads)


@dataclass(slots=True, eq=False)
class Waiter:
    """A program that has its turn now and then.

    Attributes:
        fiber: Its coroutine.
        turn: Of the innermost loop that may wait; None outside all.
        asleep: Nothing that it read has changed since.
        slept: It has not run since it fell asleep.
        patient: It waits for ever; else only as long as another can go on.
        hopeless: Makes the error that names the last such loop.
    """

    fiber: greenlet.greenlet
    turn: Turn | None = None
    asleep: bool = False
    slept: bool = False
    patient: bool = True
    hopeless: Callable[[str], Unsupported] | None = None


class Turns:
    """Runs the programs of one launch, each as a coroutine of its own."""

    def __init__(self, machine: Machine, options: Options, residents: int) -> None:
        """Run at most `residents` programs at a time, twice as many each time all of them wait."""
        self._machine, self._options, self._residents = machine, options, residents
        self._ready: deque[Waiter] = deque()
        self._sleepers: dict[int, dict[Waiter, None]] = {}  # by place, in order
        self._hub = greenlet.getcurrent()
        self._now: Waiter
        self._idle, self._since = 0, time.monotonic()
        self._random = np.random.default_rng(options.schedule_seed)

    # -- called by the running program
    @property
    def watching(self) -> bool:
        """Whether it matters what the running program reads."""
        turn = self._now.turn
        return turn is not None and turn.pure

    def saw(self, touched: Touched) -> None:
        """The running program read these elements."""
        turn = self._now.turn
        if turn is None or not turn.pure:
            return
        flat = touched.of(touched.arg.flat)
        turn.reads.append((flat, touched.index, flat[touched.index]))
        turn.places.update(_places(touched))
        if len(turn.places) > _WATCHED:
            turn.spoil()

    def changed(self, touched: Touched, before: Array) -> bool:
        """The running program wrote these elements, which held `before`; whether that matters."""
        now = touched.of(touched.arg.flat)[touched.index]
        if now.tobytes() == before.tobytes():
            return False
        if self._now.turn is not None:
            self._now.turn.spoil()
        self._progress()
        if self._sleepers:
            for place in sorted(self._sleepers.keys() & _places(touched)):
                self._wake(place)
        return True

    def did_atomic(self, touched: Touched, before: Array) -> None:
        """The running program did an atomic; others go on if it changed memory."""
        self.saw(touched)
        if self.changed(touched, before) and self._options.schedule != "serial":
            self._pause()

    def begin(self) -> Turn | None:
        """Enter a loop that may wait; returns what `end` wants back."""
        outer, self._now.turn = self._now.turn, Turn()
        return outer

    def again(
        self, old: Sequence[RuntimeValue], new: Sequence[RuntimeValue],
        hopeless: Callable[[str], Unsupported], *, patient: bool = True,
    ) -> bool:  # fmt: skip
        """Between two turns of a loop: the last began with `old`, the next begins with `new`.

        Returns whether to wait on: False once nobody else can go on, if not `patient`.
        """
        me = self._now
        me.hopeless, me.patient = hopeless, patient
        self._idle += 1
        if self._idle > _IDLE_TURNS and time.monotonic() - self._since > _IDLE_SECONDS:
            raise self._stuck(me, f"nothing has changed in {self._idle} turns")
        if me.turn is not None and me.turn.pure and all(map(same, old, new)):
            self._sleep(me)
        self._pause()
        me.turn = Turn(first=False)
        expired, me.asleep, me.patient = me.asleep, False, True
        return not expired

    def end(self, outer: Turn | None) -> None:
        """Leave a loop that may wait."""
        inner, self._now.turn = self._now.turn, outer
        if outer is None or inner is None:
            return
        if inner.first and inner.pure and outer.pure:  # nobody else ran meanwhile
            outer.reads += inner.reads
            outer.places |= inner.places
        else:
            outer.spoil()

    # -- scheduling
    def _progress(self) -> None:
        self._idle, self._since = 0, time.monotonic()

    def _pause(self) -> None:
        lanes = self._machine.lanes
        self._hub.switch()
        self._machine.lanes = lanes

    def _sleep(self, waiter: Waiter) -> None:
        waiter.asleep = waiter.slept = True
        if waiter.turn is not None:
            for place in waiter.turn.places:
                self._sleepers.setdefault(place, {})[waiter] = None

    def _wake(self, place: int) -> None:
        for waiter in self._sleepers.pop(place):
            if waiter.asleep:
                waiter.asleep = False
                self._ready.append(waiter)

    def _next(self) -> Waiter:
        if self._options.schedule == "shuffled":
            self._ready.rotate(int(self._random.integers(len(self._ready))))
        return self._ready.popleft()

    def run(self, order: Array, program: Callable[[Array], None]) -> None:
        """Run `program` on each linear number, in turns, beginning in this order.

        Raises:
            Unsupported: All programs wait, and none for one that may still begin.
        """
        coming = deque(order.reshape(-1, 1))
        alive: dict[Waiter, None] = {}
        may_exceed = self._options.residents is None
        try:
            while coming or alive:
                if may_exceed and not self._ready:
                    self._residents = max(self._residents, 2 * len(alive))
                while coming and len(alive) < self._residents:
                    waiter = _begin(program, coming.popleft())
                    alive[waiter] = None
                    self._ready.append(waiter)
                if not self._ready and not self._time_is_up(alive):
                    more = f", and {len(coming)} more cannot begin" if coming else ""
                    why = f"all {len(alive)} programs left wait{more}"
                    raise self._stuck(next(iter(alive)), why)
                waiter = self._next()
                if self._step(waiter):
                    del alive[waiter]
        finally:
            for waiter in alive:
                if not waiter.fiber.dead:
                    waiter.fiber.throw()

    def _time_is_up(self, alive: dict[Waiter, None]) -> bool:
        """Let the first program go on that does not wait for ever; whether there is one."""
        waiter = next((x for x in alive if not x.patient), None)
        if waiter is not None:
            waiter.slept = False  # but asleep: nothing that it waits for has come
            self._ready.append(waiter)
        return waiter is not None

    def _step(self, waiter: Waiter) -> bool:
        """Give a program its turn; whether it has finished."""
        if waiter.slept and waiter.turn is not None and waiter.turn.repeats():
            self._sleep(waiter)  # what it waits for changed back before its turn came
            return False
        waiter.slept, self._now = False, waiter
        waiter.fiber.switch()
        if waiter.fiber.dead:
            self._progress()
        elif not waiter.asleep:
            self._ready.append(waiter)
        return bool(waiter.fiber.dead)

    @staticmethod
    def _stuck(waiter: Waiter, why: str) -> Unsupported:
        if waiter.hopeless is None:
            raise AssertionError
        return waiter.hopeless(f"a loop that waits for another program ({why})")


def _begin(program: Callable[[Array], None], number: Array) -> Waiter:
    def body() -> None:
        with np.errstate(all="ignore"):  # a coroutine starts with NumPy's defaults
            program(number)

    return Waiter(greenlet.greenlet(body))


def _places(touched: Touched) -> set[int]:
    """The granules of memory that elements lie in."""
    at = touched.index
    if touched.cells.axis is not None:
        at = at[:, None] + np.arange(touched.cells.length)
    addresses = touched.arg.address + at * touched.arg.flat.itemsize
    return set((addresses >> _PLACE).reshape(-1).tolist())
