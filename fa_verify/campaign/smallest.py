"""Failing cases made small: which of them, and how; each with its likely cause."""

from __future__ import annotations

import collections
import time
from typing import TYPE_CHECKING

from fa_verify.backends.base import Setup
from fa_verify.case import Case
from fa_verify.faults import LOCATING, located
from fa_verify.record import CaseRecord, Shrunk, kind_of
from fa_verify.strategies import shrink

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from fa_verify.campaign.plan import Plan
    from fa_verify.kernel import Kernel
    from fa_verify.pool import Pool

__all__ = ["distinct", "smallest"]

_MOST_ALIKE = 2  # other failing cases that a cause must explain as well


def distinct(
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


def smallest(
    pool: Pool,
    kernel: Kernel,
    record: CaseRecord,
    plan: Plan,
    failed: Sequence[CaseRecord],
    *,
    end: float | None = None,
) -> Shrunk:
    """The smallest case found on which the kernel still fails in the same way, with its cause.

    Args:
        pool: Where cases run.
        kernel: The kernel.
        record: A case that failed.
        plan: The campaign's.
        failed: Every case on which the kernel failed.
        end: When, by the monotonic clock, nothing more is to be tried; None: no limit.
    """

    def left(seconds: float) -> float:
        return seconds if end is None else max(0.0, min(seconds, end - time.monotonic()))

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
        shrink(case, fails, capabilities=kernel.takes, max_seconds=left(plan.shrink_seconds))
    if "crash" in {failure.check for failure in best.failures}:
        where = located(pool, kernel, best, seconds=left(LOCATING))
        return Shrunk(original=record.case, record=where)
    explained = run(Case.parse(best.case), search=found, explain=True)
    return Shrunk(original=record.case, record=explained if explained.failures else best)


def _alike(record: CaseRecord, failed: Sequence[CaseRecord]) -> tuple[str, ...]:
    """The case itself, and the smallest other ones that fail in the same way."""
    wanted = {(f.check, f.title) for f in record.failures[:1]}
    same = [r for r in failed if wanted & {(f.check, f.title) for f in r.failures}]
    near = sorted((r for r in same if r is not record), key=_size)[:_MOST_ALIKE]
    return tuple(r.case for r in (record, *near))
