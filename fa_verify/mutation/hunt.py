"""`Hunt`: mutants against cases, in worker processes; what dies sees no more cases.

First each mutant runs on its part of a case only and is judged where its bits differ. For what is
left, further cases are chosen. What lives on runs on whole cases under every check, those that run
a kernel again included.
"""

from __future__ import annotations

import collections
import dataclasses
import multiprocessing
import time
from concurrent.futures import FIRST_COMPLETED, wait
from typing import TYPE_CHECKING

import pebble

from fa_verify.mutation import work
from fa_verify.mutation.choice import late
from fa_verify.mutation.proving import prove
from fa_verify.mutation.quarry import Prey, Quarry
from fa_verify.mutation.subject import Fate

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence
    from concurrent.futures import Future

    from fa_verify.case import Case
    from fa_verify.mutation.choice import Choice, Drawn
    from fa_verify.mutation.proving import Proofs
    from fa_verify.ttir.mutation.mutants import Mutant
    from fa_verify.ttir.mutation.recorder import AnyMutant, Found

__all__ = ["Hunt"]

Fates = list[tuple[Fate, float]]

# Mutants tried by one process in a row: to make a case, and run the kernel itself on it, takes as
# long as ten of them.
_CHUNK, _LEAST = 48, 4
_LONG = (
    20.0  # seconds that a process is given work for: what is not done when the time ends is lost
)
_TRIES = 40  # cases on which a mutant is tried at most: the first that were chosen
_PROVEN = 16  # likewise, of one that is proven to change nothing: only the proof is looked after
_WHOLES = 6  # cases on which a survivor is tried under all checks
# One case of so many is kept for functions that few of the others run, and one for what survives.
_KEPT, _FURTHER = 6, 4
_ROUNDS = 2  # in which the latter are chosen
_MEMORY = 8 << 30
_PATIENCE = 1.0  # seconds after which it is asked again whether the time is over
_CASE_SECONDS = 600.0  # a process that is silent for so long is killed


@dataclasses.dataclass(slots=True, eq=False)
class _Trail:
    """A mutant, the cases that it is still to be tried on, and whether in a process of its own."""

    quarry: Quarry
    left: collections.deque[Prey]
    alone: bool = False


class Hunt:
    """One run.

    Attributes:
        workers: How many processes.
        unfit: Cases on which the kernel itself fails, and how; no mutant is judged by them.
        cases: Cases that mutants are judged by.
        quarries: All mutants that the cases allow, by their ids.
    """

    def __init__(self, workers: int, end: float | None) -> None:
        """Start the processes.

        Args:
            workers: Processes.
            end: `time.monotonic()` moment after which nothing is begun; None: no limit.
        """
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["fa_verify.mutation.work", "fa_verify.backends.cpu"])
        self._pool = pebble.ProcessPool(
            max_workers=workers, context=context, initializer=work.start, initargs=(_MEMORY,)
        )
        self.workers, self._end = workers, end
        self.unfit: list[tuple[Case, str]] = []
        self.cases: list[Prey] = []
        self.quarries: dict[str, Quarry] = {}
        self._looked_at = 0
        self._choices: dict[str, tuple[Choice, int]] = {}
        self._pace = 0.0  # seconds that a mutant took of late

    def survey(self, target: str, choice: Choice, count: int) -> None:
        """Run a kernel itself on cases, and look which mutants each allows.

        A part of the cases is kept for Triton functions that few of the others run, and a part for
        mutants that survive.

        Args:
            target: The kernel.
            choice: Where cases come from.
            count: How many are asked for.
        """
        self._choices[target] = choice, count // _FURTHER
        count += self._looked_at - count // _FURTHER
        first = len(self.cases)
        self._look(target, choice.first((count - self._looked_at) * (_KEPT - 1) // _KEPT))
        mine = {prey.number: prey.case for prey in self.cases[first:]}
        ran: dict[str, set[int]] = collections.defaultdict(set)
        for quarry in self.quarries.values():
            ran[quarry.mutant.kernel] |= quarry.cases & mine.keys()
        rare = sorted((len(numbers), name) for name, numbers in ran.items() if numbers)
        for turn, (met, name) in enumerate(rare):
            left = count - self._looked_at
            wanted = min(_TRIES - met, -(-left // (len(rare) - turn)))
            known = [mine[number] for number in sorted(ran[name])]
            self._look(target, choice.alike(known, max(0, wanted)))
        self._look(target, choice.first(count - self._looked_at))

    def _look(self, target: str, drawn: Sequence[Drawn]) -> None:
        started = [
            self._pool.schedule(
                work.survey,
                args=(target, str(case), str(setup)),
                timeout=_CASE_SECONDS,
            )
            for case, setup in drawn
        ]
        first, self._looked_at = self._looked_at, self._looked_at + len(drawn)
        for number, ((case, setup), future) in enumerate(zip(drawn, started, strict=True), first):
            while not future.done() and not self._late():
                wait([future], timeout=_PATIENCE)
            if not future.done():
                future.cancel()  # type: ignore[no-untyped-call]
                continue
            failure, parts = _ready(future)
            if failure:
                self.unfit.append((case, failure))
                continue
            self.cases.append(Prey(number, target, case, setup, late((case, setup))))
            for index, (found, differ) in enumerate(parts):
                for mutant, known in found.items():
                    self._meet(mutant, known).meets(number, index, differs=mutant in differ)

    def _meet(self, mutant: AnyMutant, known: Found) -> Quarry:
        quarry = self.quarries.get(mutant.id)
        if quarry is None:
            quarry = self.quarries[mutant.id] = Quarry(mutant, known)
        else:
            quarry.found = quarry.found.joined(known)
        return quarry

    def run(self, wanted: Sequence[Quarry], progress: Callable[[str, int], None]) -> None:
        """Try mutants on parts of all cases, what is left on further ones, then on whole cases.

        Args:
            wanted: The mutants.
            progress: Told after every trial or so: which pass, and how many mutants are left.
        """

        def tell(name: str) -> None:
            progress(name, sum(q.fate is None for q in wanted))

        self._follow(
            [self._trail(q, self.cases, _PROVEN if q.proof else _TRIES) for q in wanted],
            deep=False,
            tell=lambda: tell("parts"),
        )
        for _ in range(_ROUNDS):
            left = [q for q in wanted if q.fate is None and not q.proof]
            self._follow(self._pursued(left), deep=False, tell=lambda: tell("further parts"))
        same = [q for q in wanted if q.fate is None and not q.proof and not q.changed]
        prove(same, self.cases, self._ask, self._late, lambda: tell("proofs"))
        left = [q for q in wanted if q.fate is None and not q.proof]
        self._follow(
            [self._trail(q, self.cases, _WHOLES) for q in left],
            deep=True,
            tell=lambda: tell("whole"),
        )

    def _pursued(self, quarries: Sequence[Quarry]) -> list[_Trail]:
        """Choose further cases of each kernel for mutants that live."""
        first = len(self.cases)
        for target, (choice, further) in self._choices.items() if quarries else ():
            known = [prey for prey in self.cases[:first] if prey.target == target]
            places = {prey.number: place for place, prey in enumerate(known)}
            ran = [[places[n] for n in q.cases if n in places] for q in quarries]
            drawn = choice.unlike([prey.case for prey in known], ran, further // _ROUNDS)
            self._look(target, drawn)
        return [self._trail(q, self.cases[first:]) for q in quarries]

    def _ask(self, prey: Prey, mutants: Sequence[Mutant]) -> Future[Proofs]:
        future: Future[Proofs] = self._pool.schedule(
            work.prove,
            args=(prey.target, str(prey.case), str(prey.setup), mutants),
            timeout=_CASE_SECONDS,
        )
        return future

    @staticmethod
    def _trail(quarry: Quarry, cases: Sequence[Prey], most: int | None = None) -> _Trail:
        """A mutant and the first cases on which it computes anything else, the cheapest first."""
        meeting = [prey for prey in cases if prey.number in quarry.parts][:most]
        quarry.due |= {prey.number for prey in meeting}
        return _Trail(quarry, collections.deque(sorted(meeting, key=lambda prey: prey.late)))

    def _follow(self, trails: Sequence[_Trail], *, deep: bool, tell: Callable[[], None]) -> None:
        """Try each mutant on one case after the other, up to its end or that of the time."""
        ready: dict[int, list[_Trail]] = collections.defaultdict(list)
        running: dict[Future[Fates], list[_Trail]] = {}
        _join(ready, trails)
        while (any(ready.values()) or running) and not self._late():
            while any(ready.values()) and len(running) < 2 * self.workers:
                chunk = self._chunk(ready)
                running[self._schedule(chunk, deep=deep)] = chunk
            done, _ = wait(running, timeout=_PATIENCE, return_when=FIRST_COMPLETED)
            for future in done:
                chunk = running.pop(future)
                begin = sum(trail.quarry.seconds for trail in chunk)
                _settle(chunk, future, deep=deep)
                spent = sum(trail.quarry.seconds for trail in chunk) - begin
                self._pace = (self._pace + spent / len(chunk)) / 2
                _join(ready, chunk)
            tell()
        for future in running:
            future.cancel()

    def _late(self) -> bool:
        return self._end is not None and time.monotonic() > self._end

    def _chunk(self, ready: dict[int, list[_Trail]]) -> list[_Trail]:
        """Some mutants that are to be tried on the same case: that on which most are."""
        trails = max(ready.values(), key=len)
        if trails[-1].alone:
            return [trails.pop()]
        share = max(_LEAST, len(trails) // self.workers)
        size = min(_CHUNK, share, max(_LEAST, int(_LONG / max(self._pace, _LONG / _CHUNK))))
        chunk, trails[:] = trails[:size], trails[size:]
        return chunk

    def _schedule(self, chunk: Sequence[_Trail], *, deep: bool) -> Future[Fates]:
        prey = chunk[0].left[0]
        tasks = [(x.quarry.mutant, part) for x in chunk for part in _parts(x, deep=deep)]
        future: Future[Fates] = self._pool.schedule(
            work.attempt,
            args=(prey.target, str(prey.case), str(prey.setup), tasks),
            timeout=_CASE_SECONDS,
        )
        return future

    def stop(self) -> None:
        """End the processes."""
        self._pool.stop()  # type: ignore[no-untyped-call]
        self._pool.join()


def _join(ready: dict[int, list[_Trail]], trails: Iterable[_Trail]) -> None:
    """Let mutants wait for the next case of each, if there is one and they still live."""
    for trail in trails:
        if trail.left and trail.quarry.fate is None:
            ready[trail.left[0].number].append(trail)


def _parts(trail: _Trail, *, deep: bool) -> list[int | None]:
    return [None] if deep else [*trail.quarry.parts[trail.left[0].number]]


def _settle(chunk: Sequence[_Trail], future: Future[Fates], *, deep: bool) -> None:
    """Note fates; where the process died, each mutant is to be tried in a process of its own."""
    try:
        fates = iter(future.result())
    except (TimeoutError, pebble.ProcessExpired) as error:
        if len(chunk) > 1:
            for trail in chunk:
                trail.alone = True
            return
        check = "timeout" if isinstance(error, TimeoutError) else "crash"
        died = Fate(kind="killed", check=check, message="the worker process died")
        fates = iter([(died, 0.0)] * len(_parts(chunk[0], deep=deep)))
    for trail in chunk:
        mine = [next(fates) for _ in _parts(trail, deep=deep)]
        trail.quarry.note(mine, trail.left.popleft().number)


def _ready(future: Future[work.Ready]) -> work.Ready:
    try:
        return future.result()
    except (TimeoutError, pebble.ProcessExpired) as error:
        return f"{type(error).__name__}: {error}", []
