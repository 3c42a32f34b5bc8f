"""The campaign itself: it keeps the workers busy until cases or time end."""

from __future__ import annotations

import collections
import dataclasses
import itertools
import operator
import time
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from queue import SimpleQueue
from typing import TYPE_CHECKING

from fa_verify.backends.fences.fence import POISON
from fa_verify.campaign.cases import (
    CUDA_FORMS,
    SHARD,
    compiles,
    further,
    numbered,
    setup_of,
)
from fa_verify.campaign.smallest import distinct, smallest
from fa_verify.faults import located
from fa_verify.pool import Pool
from fa_verify.verdict import Verdict

if TYPE_CHECKING:
    from collections.abc import Iterator

    from fa_verify.backends.base import Setup
    from fa_verify.campaign.plan import Listener, Plan
    from fa_verify.case import Case
    from fa_verify.examples import Examples
    from fa_verify.kernel import Kernel
    from fa_verify.record import CaseRecord, Shrunk

__all__ = ["replay", "run"]

_TOGETHER = 16  # cases that a worker on a card gets at a time
_AHEAD = 2  # cases that are compiled for before each of the first ones: faster than those are met


def run(
    kernels: tuple[Kernel, ...], plan: Plan, listener: Listener, examples: Examples | None = None
) -> None:
    """Verify every kernel on its share of cases, then make each kind of failure small.

    What failed before (`examples`) comes first, and beside that share; a search found it, so that
    it is judged by det alone.
    """
    begin = time.monotonic()
    end = None if plan.seconds is None else begin + plan.seconds
    # A budget keeps a fifth of itself for shrinking.
    last_start = None if plan.seconds is None else begin + 0.8 * plan.seconds
    pool = _pool(plan)
    try:
        known: list[_Item] = []
        if examples is not None:
            listener = _Remembering(listener, examples)
            known = [item for kernel in kernels for item in _known(kernel, plan, examples)]
        failed = _verify_all(pool, kernels, plan, listener, last_start, known=known)
        _shrink_all(pool, failed, plan, listener, end)
    finally:
        pool.stop()


def _pool(plan: Plan) -> Pool:
    card = plan.backend == "cuda"
    return Pool(
        plan.workers,
        timeout=plan.timeout,
        memory=plan.memory,
        cap=not card,
        card=card,
        spool=plan.spool,
        lanes=plan.lanes,
    )


def _ahead(kernels: tuple[Kernel, ...], plan: Plan) -> Iterator[tuple[Kernel, Case, Setup]]:
    """What is compiled before it is judged: the first shard of each kernel, on a card.

    First a case of each form with a backward pass, which compiles all of the form's kernels, then
    one without, and so on: neighbours are of different forms, so that all processes are busy.
    Between poison, where a fault is rare: it would end the process, and tell nothing new.
    """
    if plan.backend != "cuda" or plan.long or plan.processes == 1:
        return
    met: collections.Counter[tuple[str, int, bool]] = collections.Counter()
    ranked = []
    for kernel in kernels:
        for index, case in itertools.islice(numbered(kernel, plan), SHARD):
            kind = (kernel.target, index % CUDA_FORMS, case.backward)
            setup = dataclasses.replace(setup_of(plan, index), fence=POISON)
            ranked.append(((met[kind], not case.backward), (kernel, case, setup)))
            met[kind] += 1
    yield from (item for _, item in sorted(ranked, key=operator.itemgetter(0)))


def _shrink_all(
    pool: Pool,
    failed: list[tuple[Kernel, CaseRecord]],
    plan: Plan,
    listener: Listener,
    end: float | None,
) -> None:
    """Make each fault small; a step waits for the one before, so as many at once as workers."""

    def small(kernel: Kernel, record: CaseRecord) -> Shrunk | None:
        if end is not None and time.monotonic() > end:
            return None
        listener.shrinking(record)
        mine = [other for whose, other in failed if whose is kernel]
        return smallest(pool, kernel, record, plan, mine, end=end)

    with ThreadPoolExecutor(plan.processes) as threads:
        started = [threads.submit(small, *item) for item in distinct(failed, plan.shrinks)]
        for future in as_completed(started):
            shrunk = future.result()
            if shrunk is not None:
                listener.shrunk(shrunk)


def _verify_all(
    pool: Pool,
    kernels: tuple[Kernel, ...],
    plan: Plan,
    listener: Listener,
    last_start: float | None,
    *,
    known: list[_Item],
) -> list[tuple[Kernel, CaseRecord]]:
    """Keep the workers busy; return the failing records with their kernels."""
    failed: list[tuple[Kernel, CaseRecord]] = []
    failures: collections.Counter[str] = collections.Counter()
    running: dict[Future[CaseRecord], _Item] = {}
    # To wait for any of hundreds of futures would ask each of them, at each case.
    finished: SimpleQueue[Future[CaseRecord]] = SimpleQueue()
    more: collections.deque[_Item] = collections.deque()
    work = itertools.chain(known, _work(kernels, plan, failures))
    ahead = _ahead(kernels, plan)
    pool.compile_ahead(itertools.islice(ahead, 2 * plan.processes))
    exhausted = False
    together = _together(kernels, plan)
    while True:
        while not exhausted and len(running) < 2 * plan.processes * together:
            items = _next(more, work, together)
            if not items or (last_start is not None and time.monotonic() > last_start):
                exhausted = True
                break
            if items[0].compiles:
                pool.compile_ahead(itertools.islice(ahead, _AHEAD))
            for future, item in zip(_start(pool, items), items, strict=True):
                running[future] = item
                future.add_done_callback(finished.put)
        if not running:
            return failed
        for future in _ended(finished):
            item = running.pop(future)
            record = pool.result(future, item.kernel, item.case, item.setup)
            listener.record(record)
            if record.verdict == Verdict.FAIL:
                failed.append((item.kernel, record))
                failures[item.kernel.target] += not item.known
            elif item.setup.stress and not item.known and not plan.long:
                exhausted = False
                setups = further(item.setup, record)
                more.extend(dataclasses.replace(item, setup=setup) for setup in setups)


def _ended(finished: SimpleQueue[Future[CaseRecord]]) -> Iterator[Future[CaseRecord]]:
    """The next that ends, and those that have meanwhile."""
    yield finished.get()
    while not finished.empty():
        yield finished.get()


def _together(kernels: tuple[Kernel, ...], plan: Plan) -> int:
    """Cases that a worker gets at a time: several where one takes hundredths of a second."""
    few = plan.cases is not None and plan.cases * len(kernels) < 4 * plan.processes * _TOGETHER
    return 1 if plan.backend == "cpu" or plan.long or few else _TOGETHER


def _next(more: collections.deque[_Item], work: Iterator[_Item], most: int) -> list[_Item]:
    """What one worker gets next: cases of one kernel, or one that is better alone."""
    items: list[_Item] = []
    while len(items) < most:
        item = more.popleft() if more else next(work, None)
        if item is None:
            break
        if items and (item.alone or item.kernel is not items[0].kernel):
            more.appendleft(item)
            break
        items.append(item)
        if item.alone:
            break
    return items


def _start(pool: Pool, items: list[_Item]) -> list[Future[CaseRecord]]:
    if len(items) == 1:
        return [items[0].start(pool)]
    return pool.submit_together(items[0].kernel, [(item.case, item.setup) for item in items])


class _Remembering:
    """A listener that keeps what fails, and forgets what passes, before it says so."""

    def __init__(self, listener: Listener, examples: Examples) -> None:
        self._examples = examples
        self._listener = listener
        self.shrinking = listener.shrinking

    def record(self, record: CaseRecord) -> None:
        self._examples.learn(record)
        self._listener.record(record)

    def shrunk(self, shrunk: Shrunk) -> None:
        self._examples.learn(shrunk.record)
        self._listener.shrunk(shrunk)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Item:
    """A case to run on a kernel.

    Attributes:
        known: It failed in an earlier run.
        compiles: Its kernels are to be compiled.
    """

    kernel: Kernel
    case: Case
    setup: Setup
    known: bool = False
    compiles: bool = False

    @property
    def alone(self) -> bool:
        """Whether it takes long, or was found by a search.

        Cases that follow each other are of different forms: given to different workers, these are
        compiled at the same time.
        """
        long = self.setup.stress or self.setup.warps or self.setup.stages
        return self.known or self.compiles or bool(long)

    def start(self, pool: Pool) -> Future[CaseRecord]:
        return pool.submit(self.kernel, self.case, self.setup, search=self.known)


def _known(kernel: Kernel, plan: Plan, examples: Examples) -> Iterator[_Item]:
    """What failed before."""
    for case, setup in examples.of(kernel, backend=plan.backend):
        if plan.dtype in (None, case.problem.dtype, case.problem.storage):
            yield _Item(kernel=kernel, case=case, setup=setup, known=True)


def _work(
    kernels: tuple[Kernel, ...], plan: Plan, failures: collections.Counter[str]
) -> Iterator[_Item]:
    """Some cases of each kernel in turn; a kernel that failed enough drops out.

    Kernels meet the same cases. Variants share functions, and what one of them compiled the next
    finds in Triton's disk cache, unless both are compiled at the same time: hence some in turn.
    """
    streams = {kernel: numbered(kernel, plan) for kernel in kernels}
    while streams:
        for kernel in list(streams):
            turn = list(itertools.islice(streams[kernel], plan.turn))
            if not turn:
                del streams[kernel]
            for index, case in turn:
                if failures[kernel.target] >= plan.max_failures:
                    streams.pop(kernel, None)
                    break
                yield _Item(
                    kernel=kernel,
                    case=case,
                    setup=setup_of(plan, index),
                    compiles=compiles(plan, index),
                )


def replay(kernel: Kernel, case: Case, setup: Setup, plan: Plan, *, drawn: bool) -> CaseRecord:
    """One case again, in a worker of its own, with its likely cause."""
    pool = _pool(plan)
    try:
        future = pool.submit(kernel, case, setup, search=not drawn, explain=True)
        record = pool.result(future, kernel, case, setup)
        return located(pool, kernel, record)
    finally:
        pool.stop()
