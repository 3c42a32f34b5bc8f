"""`located`: a fault on a card, told by argument and element, from runs in fresh processes.

A fault loses its process's context and says no more than that it happened. The case is run again
with an unmapped page beside one tensor at a time: the one that faults again is the argument. With
the page ever further away, the access is measured; between canaries a write shows; and the CPU's
executor, where it takes the case, has the line.
"""

from __future__ import annotations

import dataclasses
import time
from typing import TYPE_CHECKING

import msgspec

from fa_verify.backends.base import Setup
from fa_verify.backends.fences.fence import POISON, Fence
from fa_verify.backends.fences.placement import ALIGNED
from fa_verify.case import Case
from fa_verify.pool import Pool
from fa_verify.ttir.memory.views import coordinates

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from concurrent.futures import Future

    from fa_verify.kernel import Kernel
    from fa_verify.record import CaseRecord, FailureRecord
    from fa_verify.spool import Argument, Running

__all__ = ["LOCATING", "located"]

# Distances in bytes at which the page is tried first, all at once; then four at a time between the
# last that faults and the first that does not, down to the 16 bytes of an aligned base.
_DISTANCES = tuple(1 << bits for bits in range(6, 27, 4))
_AT_ONCE = 4
LOCATING = 40.0
"""Seconds: a fault costs one to three of them, and there are about 25 to provoke."""


def located(
    pool: Pool, kernel: Kernel, record: CaseRecord, *, seconds: float = LOCATING
) -> CaseRecord:
    """The record of a fault with the argument and the element, as far as they can be found.

    Args:
        pool: Where the case faulted.
        kernel: The kernel.
        record: Of a fault on a card; any other record comes back as it is.
        seconds: Time for it; without any the record comes back as it is, too.
    """
    crashed = [failure.check for failure in record.failures] == ["crash"]
    if not crashed or seconds <= 0 or Setup.parse(record.setup).backend != "cuda":
        return record
    search = _Search(pool, kernel, record, time.monotonic() + seconds)
    failure = record.failures[0]
    found: list[str] = []
    argument = search.argument()
    on_cpu = search.on_the_cpu()
    if argument is not None:
        found += [*search.page(argument), *search.write(argument)]
        failure = msgspec.structs.replace(failure, tensor=argument.name)
    if on_cpu is not None:
        found.append(f"on the CPU, {on_cpu.title}: {on_cpu.message}")
        failure = msgspec.structs.replace(
            failure,
            tensor=failure.tensor or on_cpu.tensor,
            location=on_cpu.location,
            source=on_cpu.source,
            diagnosis=on_cpu.diagnosis,
        )
    message = "; ".join([failure.message, *found])
    return msgspec.structs.replace(
        record, failures=(msgspec.structs.replace(failure, message=message),)
    )


class _Search:
    """Runs of one case under other fences."""

    def __init__(self, pool: Pool, kernel: Kernel, record: CaseRecord, end: float) -> None:
        self._pool, self._kernel, self._end = pool, kernel, end
        self._case, self._setup = Case.parse(record.case), Setup.parse(record.setup)
        self._last = pool.last(record)
        self._fence = Fence.parse(self._last.fence or "off")

    def argument(self) -> Argument | None:
        """The argument of the launch beside which an unmapped page alone makes the case fault."""
        if self._fence.mode != "page":  # a fault without a page: find one that is there with it
            pages = [Fence(mode="page"), Fence(mode="page", start=True)]
            self._last = next((x for x in self._faults(pages) if x is not None), self._last)
            self._fence = Fence.parse(self._last.fence or "off")
        launch = self._last.launch
        if launch is None or self._fence.mode != "page":
            return None
        labels = list(dict.fromkeys(a.label for a in launch.arguments if a.label))
        tried = self._faults([dataclasses.replace(self._fence, only=x) for x in labels])
        for label, last in zip(labels, tried, strict=True):
            if last is not None:
                self._last, self._fence = last, Fence.parse(last.fence)
                return next(a for a in launch.arguments if a.label == label)
        return None

    def page(self, argument: Argument) -> Iterator[str]:
        """Which page, and how far past it the access goes."""
        side = "before the first" if self._fence.start else "behind the last"
        yield (
            f"an unmapped page {side} element of {argument.name}, of shape {argument.shape} and "
            f"strides {argument.strides}, suffices"
        )
        near, far = 0, None
        distances: Sequence[int] = _DISTANCES
        while distances and time.monotonic() < self._end:
            fences = [dataclasses.replace(self._fence, gap=gap) for gap in distances]
            for gap, last in zip(distances, self._faults(fences), strict=True):
                if last is not None:
                    near = max(near, gap)
                else:
                    far = gap if far is None else min(far, gap)
            if far is None:
                break
            distances = _between(near, far)
        if far is not None:
            size, step = argument.itemsize, -1 if self._fence.start else 1
            reach = max(1, far // size)
            edge = 0 if self._fence.start else _span(argument) - 1
            where = coordinates(argument.shape, argument.strides, edge + step * reach)
            place = "" if where is None else f", at most to element {where}"
            yield f"it goes {near // size + 1} to {reach} elements past that element{place}"

    def write(self, argument: Argument) -> Iterator[str]:
        """What canaries in the page's place say."""
        future = self._submit(POISON)
        record = self._pool.result(future, self._kernel, self._case, self._with(POISON))
        for failure in record.failures:
            if failure.check == "memory" and failure.tensor == argument.name:
                yield f"with poison in the page's place, {failure.title}: {failure.message}"
                return
        yield "with poison in the page's place nothing is written there: it reads"

    def on_the_cpu(self) -> FailureRecord | None:
        """What the executor's sanitizer says of the case, in a process that knows no card."""
        setup = Setup(config=self._setup.config)
        pool = Pool(1, timeout=max(1.0, self._end - time.monotonic()), memory=8 << 30, cap=False)
        try:
            future = pool.submit(self._kernel, self._case, setup, search=True, explain=True)
            record = pool.result(future, self._kernel, self._case, setup)
        finally:
            pool.stop()
        return next((f for f in record.failures if f.check == "memory"), None)

    def _faults(self, fences: Sequence[Fence]) -> list[Running | None]:
        """For each fence what the process was at when it died of a fault; None: it lived."""
        futures = [self._submit(fence) for fence in fences]
        found: list[Running | None] = []
        for fence, future in zip(fences, futures, strict=True):
            setup = self._with(fence)
            record = self._pool.result(future, self._kernel, self._case, setup)
            died = [failure.check for failure in record.failures] == ["crash"]
            found.append(self._pool.last(record) if died else None)
        return found

    def _submit(self, fence: Fence) -> Future[CaseRecord]:
        return self._pool.submit(self._kernel, self._case, self._with(fence), search=True)

    def _with(self, fence: Fence) -> Setup:
        return dataclasses.replace(self._setup, fence=fence, stress=0)


def _span(argument: Argument) -> int:
    """Elements from an argument's first one to its last, both counted."""
    pairs = zip(argument.shape, argument.strides, strict=True)
    return 1 + sum((size - 1) * stride for size, stride in pairs)


def _between(near: int, far: int) -> list[int]:
    """Multiples of 16 that split what lies between two of them, few and evenly.

    >>> _between(64, 1024)
    [256, 448, 640, 832]
    >>> _between(64, 80)
    []
    """
    steps = (far - near) // ALIGNED
    parts = min(_AT_ONCE + 1, steps)
    return sorted({near + steps * i // parts * ALIGNED for i in range(1, parts)})
