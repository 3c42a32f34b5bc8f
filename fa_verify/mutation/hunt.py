"""`Hunt`: mutants against cases, in worker processes; what dies sees no more cases.

First each mutant runs on its part of a case only and is judged where its bits differ. What is left
after all cases runs on whole cases under every check, those that run a kernel again included.
"""

from __future__ import annotations

import dataclasses
import multiprocessing
import time
from typing import TYPE_CHECKING

import pebble

from fa_verify.mutation import work
from fa_verify.mutation.subject import Fate

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from concurrent.futures import Future

    from fa_verify.backends.base import Setup
    from fa_verify.case import Case
    from fa_verify.kernel import Kernel
    from fa_verify.ttir.mutation.recorder import AnyMutant, Found

__all__ = ["Hunt", "Quarry"]

_CHUNK = 16  # mutants tried by one process in a row
_WHOLES = 16  # cases on which a survivor is tried under all checks
_MEMORY = 8 << 30
_CASE_SECONDS = 600.0  # a process that is silent for so long is killed


@dataclasses.dataclass(slots=True)
class Quarry:
    """A mutant, and what has become of it.

    Attributes:
        mutant: The mutant; found: what is known beforehand.
        cases: Numbers of the cases whose code it is in, until its fate came.
        parts: Case number to the parts of it in which the mutated operation computes anything
            else: on the others it gives the same bits.
        fate: Its end, if it has come; changed: numbers of the cases that gave other bits.
        killer: Number of the case that ended it.
        tried: On how many cases it ran; wholes: on how many of them under all checks.
        seconds: Spent.
    """

    mutant: AnyMutant
    found: Found
    cases: set[int] = dataclasses.field(default_factory=set)
    parts: dict[int, list[int]] = dataclasses.field(default_factory=dict)
    fate: Fate | None = None
    killer: int | None = None
    changed: set[int] = dataclasses.field(default_factory=set)
    tried: int = 0
    wholes: int = 0
    seconds: float = 0.0

    def meets(self, number: int, part: int, *, differs: bool) -> None:
        """Note that a part of a case has its code, and whether that computes anything else."""
        self.cases.add(number)
        if differs:
            self.parts.setdefault(number, []).append(part)

    @property
    def proof(self) -> str:
        """Why it makes no difference, wherever it was met; "" if it may."""
        return "" if "" in self.found.proofs else "; ".join(sorted(self.found.proofs))


@dataclasses.dataclass(slots=True)
class _Prey:
    """A case that the kernel itself passes."""

    number: int
    case: Case
    setup: Setup


class Hunt:
    """One run.

    Attributes:
        unfit: Cases on which the kernel itself fails, and how; no mutant is judged by them.
        cases: Cases that mutants are judged by.
        quarries: All mutants that the cases allow, by their ids.
    """

    def __init__(self, kernel: Kernel, workers: int, end: float | None) -> None:
        """Start the processes.

        Args:
            kernel: The kernel.
            workers: Processes.
            end: `time.monotonic()` moment after which nothing is begun; None: no limit.
        """
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["fa_verify.mutation.work", "fa_verify.backends.cpu"])
        self._pool = pebble.ProcessPool(
            max_workers=workers, context=context, initializer=work.start, initargs=(_MEMORY,)
        )
        self._kernel, self._workers, self._end = kernel, workers, end
        self.unfit: list[tuple[Case, str]] = []
        self.cases: list[_Prey] = []
        self.quarries: dict[str, Quarry] = {}

    def survey(self, drawn: Sequence[tuple[Case, Setup]]) -> None:
        """Run the kernel itself on all cases, and look which mutants each allows."""
        started = [
            self._pool.schedule(
                work.survey,
                args=(self._kernel.target, str(case), str(setup)),
                timeout=_CASE_SECONDS,
            )
            for case, setup in drawn
        ]
        for number, ((case, setup), future) in enumerate(zip(drawn, started, strict=True)):
            failure, parts = _ready(future)
            if failure:
                self.unfit.append((case, failure))
                continue
            self.cases.append(_Prey(number, case, setup))
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

    def run(self, wanted: Sequence[Quarry], progress: Callable[[str, int, int], None]) -> None:
        """Try mutants on all cases, then what is left on whole cases.

        Args:
            wanted: The mutants.
            progress: Told after each case: which pass, how many cases are done, how many mutants
                are left.
        """
        for name, deep in (("parts", False), ("whole", True)):
            for done, prey in enumerate(self.cases, 1):
                left = [q for q in wanted if q.fate is None and prey.number in q.parts]
                if deep:
                    left = [q for q in left if not q.proof and q.wholes < _WHOLES]
                if left and not self._late():
                    self._try(prey, left, deep=deep)
                progress(name, done, sum(q.fate is None for q in wanted))

    def _late(self) -> bool:
        return self._end is not None and time.monotonic() > self._end

    def _try(self, prey: _Prey, left: Sequence[Quarry], *, deep: bool) -> None:
        size = max(1, min(_CHUNK, -(-len(left) // (2 * self._workers))))
        chunks = [left[i : i + size] for i in range(0, len(left), size)]
        started = [(chunk, self._schedule(prey, chunk, deep=deep)) for chunk in chunks]
        for chunk, future in started:
            for quarry, fates in self._settled(prey, chunk, future, deep=deep):
                quarry.wholes += deep
                quarry.tried += not deep
                for fate, seconds in fates:
                    quarry.seconds += seconds
                    if fate.kind in ("killed", "invalid"):
                        quarry.fate, quarry.killer = quarry.fate or fate, prey.number
                    elif fate.kind == "within":
                        quarry.changed.add(prey.number)

    def _schedule(self, prey: _Prey, chunk: Sequence[Quarry], *, deep: bool) -> Future[object]:
        tasks = [task for quarry in chunk for task in _tasks(quarry, prey, deep=deep)]
        future: Future[object] = self._pool.schedule(
            work.attempt,
            args=(self._kernel.target, str(prey.case), str(prey.setup), tasks),
            timeout=_CASE_SECONDS,
        )
        return future

    def _settled(
        self, prey: _Prey, chunk: Sequence[Quarry], future: Future[object], *, deep: bool
    ) -> Iterator[tuple[Quarry, list[tuple[Fate, float]]]]:
        """The fates of a chunk; where its process died, of each mutant in a process of its own."""
        try:
            fates = iter(future.result())  # type: ignore[call-overload]
        except (TimeoutError, pebble.ProcessExpired) as error:
            if len(chunk) == 1:
                check = "timeout" if isinstance(error, TimeoutError) else "crash"
                died = Fate(kind="killed", check=check, message="the worker process died")
                yield chunk[0], [(died, 0.0)]
                return
            for quarry in chunk:
                alone = self._schedule(prey, (quarry,), deep=deep)
                yield from self._settled(prey, (quarry,), alone, deep=deep)
            return
        for quarry in chunk:
            yield quarry, [next(fates) for _ in _tasks(quarry, prey, deep=deep)]

    def stop(self) -> None:
        """End the processes."""
        self._pool.stop()  # type: ignore[no-untyped-call]
        self._pool.join()


def _tasks(quarry: Quarry, prey: _Prey, *, deep: bool) -> list[tuple[AnyMutant, int | None]]:
    parts: list[int | None] = [None] if deep else [*quarry.parts[prey.number]]
    return [(quarry.mutant, part) for part in parts]


def _ready(future: Future[work.Ready]) -> work.Ready:
    try:
        return future.result()
    except (TimeoutError, pebble.ProcessExpired) as error:
        return f"{type(error).__name__}: {error}", []
