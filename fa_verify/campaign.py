"""A budgeted run over many cases: which cases, in which processes, until when.

The parent draws cases and writes records; worker processes run kernels, one case at a time, and are
killed and replaced when a case hangs or dies. The campaign prints nothing: it calls a `Listener`.
"""

from __future__ import annotations

import collections
import dataclasses
import itertools
import time
import zlib
from concurrent.futures import (
    FIRST_COMPLETED,
    Future,
    ThreadPoolExecutor,
    as_completed,
    wait,
)
from typing import TYPE_CHECKING, Protocol

from fa_verify import distribution
from fa_verify.backends.base import Setup
from fa_verify.backends.fences.fence import in_turn
from fa_verify.case import Case
from fa_verify.faults import located
from fa_verify.pool import Pool
from fa_verify.record import CaseRecord, Shrunk, kind_of
from fa_verify.strategies import shrink
from fa_verify.verdict import Verdict

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from fa_verify.backends.fences.fence import Mode
    from fa_verify.examples import Examples
    from fa_verify.kernel import Kernel

__all__ = ["Listener", "Plan", "drawn", "further", "replay", "run"]

# Cases drawn from one seed; the next shard's seed follows from the run's. Whole turns of
# `_CUDA_FORMS`.
_SHARD = 96
_MOST_ALIKE = 2  # other failing cases that a cause must explain as well
_CONFIGS = 840  # a multiple of every number of configurations up to 8
# Forms for which a CUDA run compiles each kernel before it takes others, and the shards that it
# draws of them: a form takes some seven seconds to compile, with the variants that lengths and
# reruns make of it, a case that needs no compiling some hundredths (docs/cuda.md). Another seed of
# the run draws other forms.
_CUDA_FORMS = 12
_SHARDS_OF_FORMS = 250
# One case in so many is stressed, with `_RUNS` further runs. It has the divisor 4 in common with
# `_CUDA_FORMS`, so that the forms that are compiled for every configuration are a quarter of all;
# another seed takes others.
_STRESSED = 16
_RUNS = 12
_OPTIONS = ((4, 1), (8, 3), (2, 2), (8, 1), (4, 4))  # (num_warps, num_stages)

_TOGETHER = 8  # cases that a worker on a card gets at a time


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What a campaign does.

    Attributes:
        backend: "cpu" or "cuda".
        cases: Cases for each kernel; None: as many as the budget allows.
        seconds: Budget of the whole run, shrinking included; None: no limit.
        seed: The run's seed; every shard's follows from it.
        workers: Processes.
        spare: Further processes, which compile ahead of them (CUDA).
        timeout: Seconds that one case may take.
        memory: Bytes that one worker may allocate.
        max_failures: Failing cases after which a kernel gets no more cases.
        shrinks: Distinct faults of one kernel that are made small.
        shrink_seconds: Seconds spent on making one fault small.
        turn: Cases of one kernel before the next kernel's turn.
        dtype: Only this dtype, if given.
        stress: Some cases also run many times under stress, under every configuration, and with
            other numbers of warps and stages (`further`).
        long: The long cases, once, in the place of drawn ones (CUDA only); under stress all of
            them run many times, each in one configuration.
        fence: Mode of the fences around tensors (CUDA).
        spool: Folder where processes say what they are at; None: a temporary one.
    """

    backend: str = "cpu"
    cases: int | None = 200
    seconds: float | None = None
    seed: int = 0
    workers: int = 1
    spare: int = 0
    timeout: float = 60.0
    memory: int = 8 << 30
    max_failures: int = 10
    shrinks: int = 4
    shrink_seconds: float = 20.0
    turn: int = 16
    dtype: str | None = None
    stress: bool = False
    long: bool = False
    fence: Mode = "poison"
    spool: Path | None = None


class Listener(Protocol):
    """Whoever shows or stores what happens."""

    def record(self, record: CaseRecord) -> None:
        """A case was verified."""
        ...

    def shrinking(self, record: CaseRecord) -> None:
        """A fault is about to be made small; called from several threads."""
        ...

    def shrunk(self, shrunk: Shrunk) -> None:
        """A fault was made small."""
        ...


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
        pool.compile_ahead(_first(kernels, plan))
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
        spare=plan.spare,
    )


def _first(kernels: tuple[Kernel, ...], plan: Plan) -> Iterator[tuple[Kernel, Case, Setup]]:
    """The first shard from its end, where workers get to last: all forms, and most variants."""
    every = _work(kernels, plan, collections.Counter())
    for item in reversed(list(itertools.islice(every, _SHARD * len(kernels)))):
        yield item.kernel, item.case, item.setup


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
        return _shrink(pool, kernel, record, plan, mine)

    with ThreadPoolExecutor(plan.workers) as threads:
        started = [threads.submit(small, *item) for item in _distinct(failed, plan.shrinks)]
        for future in as_completed(started):
            shrunk = future.result()
            if shrunk is not None:
                listener.shrunk(shrunk)


def drawn(kernel: Kernel, plan: Plan) -> Iterator[tuple[Case, Setup]]:
    """The cases that a run gives a kernel, each with its setup."""
    for index, case in _cases(kernel, plan):
        yield case, _setup(plan, index)


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
    more: collections.deque[_Item] = collections.deque()
    work = itertools.chain(known, _work(kernels, plan, failures))
    exhausted = False
    together = _together(kernels, plan)
    while True:
        while not exhausted and len(running) < 2 * plan.workers * together:
            items = _next(more, work, together)
            if not items or (last_start is not None and time.monotonic() > last_start):
                exhausted = True
                break
            running.update(zip(_start(pool, items), items, strict=True))
        if not running:
            return failed
        done, _ = wait(running, return_when=FIRST_COMPLETED)
        for future in done:
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


def _together(kernels: tuple[Kernel, ...], plan: Plan) -> int:
    """Cases that a worker gets at a time: several where one takes hundredths of a second."""
    few = plan.cases is not None and plan.cases * len(kernels) < 4 * plan.workers * _TOGETHER
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
    """A case to run on a kernel; `known`: it failed in an earlier run."""

    kernel: Kernel
    case: Case
    setup: Setup
    known: bool = False

    @property
    def alone(self) -> bool:
        """Whether it takes long, or was found by a search."""
        return self.known or bool(self.setup.stress or self.setup.warps or self.setup.stages)

    def start(self, pool: Pool) -> Future[CaseRecord]:
        return pool.submit(self.kernel, self.case, self.setup, search=self.known)


def _known(kernel: Kernel, plan: Plan, examples: Examples) -> Iterator[_Item]:
    """What failed before."""
    for case, setup in examples.of(kernel, backend=plan.backend):
        if plan.dtype in (None, case.problem.dtype):
            yield _Item(kernel=kernel, case=case, setup=setup, known=True)


def _work(
    kernels: tuple[Kernel, ...], plan: Plan, failures: collections.Counter[str]
) -> Iterator[_Item]:
    """Some cases of each kernel in turn; a kernel that failed enough drops out.

    Kernels meet the same cases. Variants share functions, and what one of them compiled the next
    finds in Triton's disk cache, unless both are compiled at the same time: hence some in turn.
    """
    streams = {kernel: _cases(kernel, plan) for kernel in kernels}
    while streams:
        for kernel in list(streams):
            turn = list(itertools.islice(streams[kernel], plan.turn))
            if not turn:
                del streams[kernel]
            for index, case in turn:
                if failures[kernel.target] >= plan.max_failures:
                    streams.pop(kernel, None)
                    break
                yield _Item(kernel=kernel, case=case, setup=_setup(plan, index))


def _setup(plan: Plan, index: int) -> Setup:
    """A configuration for each case, modulo how many the kernel turns out to have.

    On the CPU it is scattered: the classes of shape follow the index too, and a configuration must
    meet them all. On CUDA a form meets one configuration only, whose kernels are compiled once.
    """
    chosen = plan.long or (index + plan.seed) % _STRESSED == 0
    stress = _RUNS if plan.stress and chosen else 0
    if plan.backend == "cuda":
        turn, form = divmod(index, _CUDA_FORMS)
        block = index // (_SHARD * _SHARDS_OF_FORMS)
        return Setup(
            backend="cuda",
            config=form + block,
            float_model="hardware",
            fence=in_turn(plan.fence, form, turn),
            stress=stress,
        )
    scattered = zlib.crc32(f"{plan.seed} {index}".encode())
    return Setup(backend=plan.backend, config=scattered % _CONFIGS, stress=stress)


def further(setup: Setup, record: CaseRecord) -> list[Setup]:
    """The setups that a stressed case runs under as well: a case each, with all its checks.

    Every other configuration, and on a card two of `_OPTIONS` on two configurations.
    """
    own = Setup.parse(record.setup).config
    plain = dataclasses.replace(setup, stress=0)
    found = [dataclasses.replace(plain, config=i) for i in range(record.configs) if i != own]
    if setup.backend == "cuda":
        turn = zlib.crc32(record.case.encode())
        for step in range(2):
            warps, stages = _OPTIONS[(turn + step) % len(_OPTIONS)]
            config = (own + step) % record.configs
            found.append(dataclasses.replace(plain, config=config, warps=warps, stages=stages))
    return found


def _cases(kernel: Kernel, plan: Plan) -> Iterator[tuple[int, Case]]:
    if plan.long:  # all with the first configuration, which is as a rule the one for long sequences
        cases = distribution.long(kernel.takes, plan.seed, dtype=plan.dtype)
        yield from ((0, case) for case in itertools.islice(cases, plan.cases))
        return
    index = 0
    for shard in range(1 << 30):
        first = (plan.seed * 1_000_003 + shard // _SHARDS_OF_FORMS) * _CUDA_FORMS
        forms = range(first, first + _CUDA_FORMS) if plan.backend == "cuda" else ()
        drawn = distribution.draw(
            plan.seed * 1_000_003 + shard,
            _SHARD,
            kernel.takes,
            dtype=plan.dtype,
            forms=forms,
        )
        for case in drawn:
            if plan.cases is not None and index >= plan.cases:
                return
            yield index, case
            index += 1


def _distinct(
    failed: list[tuple[Kernel, CaseRecord]], most: int
) -> Iterator[tuple[Kernel, CaseRecord]]:
    """Failing records that show a fault which no earlier one shows, smallest cases first.

    A kind of fault that nothing shows yet comes before another argument of a kind that is shown.
    """
    seen: set[tuple[str, ...]] = set()
    shown: collections.Counter[str] = collections.Counter()
    ordered = sorted(failed, key=lambda item: _size(item[1]))
    for kinds in (True, False):
        for kernel, record in ordered:
            faults = [(kernel.target, f.check, f.title) for f in record.failures]
            kind = [(kernel.target, f.check, kind_of(f.title)) for f in record.failures]
            if seen.issuperset(kind if kinds else faults) or shown[kernel.target] >= most:
                continue
            seen.update(faults, kind)
            shown[kernel.target] += 1
            yield kernel, record


def _size(record: CaseRecord) -> int:
    problem = Case.parse(record.case).problem
    heads = problem.batch * problem.heads_q
    return heads * (problem.seqlen_q + 1) * (problem.seqlen_k + 1) * problem.head_dim


def _shrink(
    pool: Pool, kernel: Kernel, record: CaseRecord, plan: Plan, failed: Sequence[CaseRecord]
) -> Shrunk:
    """The smallest case found on which the kernel still fails in the same way, with its cause.

    Args:
        pool: Where cases run.
        kernel: The kernel.
        record: A case that failed.
        plan: The campaign's.
        failed: Every case on which the kernel failed.
    """
    setup = Setup.parse(record.setup)
    wanted = {(f.check, f.title) for f in record.failures[:1]}
    best = record

    def run(case: Case, *, search: bool, explain: bool = False) -> CaseRecord:
        others = _alike(record, failed) if explain else ()
        future = pool.submit(kernel, case, setup, search=search, explain=explain, others=others)
        return pool.result(future, kernel, case, setup)

    def fails(case: Case) -> bool:
        nonlocal best
        tried = run(case, search=True)
        same = bool(wanted & {(f.check, f.title) for f in tried.failures})
        if same and (best is record or _size(tried) <= _size(best)):
            best = tried
        return same

    case = Case.parse(record.case)
    found = fails(case)  # else only the probabilistic bound saw it: a search may not use that
    if found:
        shrink(case, fails, capabilities=kernel.takes, max_seconds=plan.shrink_seconds)
    if "crash" in {failure.check for failure in best.failures}:
        where = located(pool, kernel, best)
        return Shrunk(original=record.case, record=where)
    explained = run(Case.parse(best.case), search=found, explain=True)
    return Shrunk(original=record.case, record=explained if explained.failures else best)


def _alike(record: CaseRecord, failed: Sequence[CaseRecord]) -> tuple[str, ...]:
    """The case itself, and the smallest other ones that fail in the same way."""
    wanted = {(f.check, f.title) for f in record.failures[:1]}
    same = [r for r in failed if wanted & {(f.check, f.title) for f in r.failures}]
    near = sorted((r for r in same if r is not record), key=_size)[:_MOST_ALIKE]
    return tuple(r.case for r in (record, *near))


def replay(kernel: Kernel, case: Case, setup: Setup, plan: Plan, *, drawn: bool) -> CaseRecord:
    """One case again, in a worker of its own, with its likely cause."""
    pool = _pool(plan)
    try:
        future = pool.submit(kernel, case, setup, search=not drawn, explain=True)
        record = pool.result(future, kernel, case, setup)
        return located(pool, kernel, record)
    finally:
        pool.stop()
