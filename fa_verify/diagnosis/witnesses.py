"""Witnesses: further trials of a kernel that failed, for what they say of the cause."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from fa_verify.checks.observed import comparisons
from fa_verify.diagnosis.neighbours import longer_shorter, moderate, simpler
from fa_verify.trial import Trial

if TYPE_CHECKING:
    from collections.abc import Sequence

    from fa_verify.case import Case

__all__ = ["call"]

_MOST = 15
_WORK = 1.2e8  # products: what half a second executes


def call(trial: Trial, others: Sequence[Case], seconds: float) -> list[Trial]:
    """Run other cases that are known to fail, then neighbours of the first, until time ends.

    The first is the smallest that fails: of a row or a key more or less it may well pass.

    Args:
        trial: A trial that failed.
        others: Cases on which the kernel is known to fail.
        seconds: Of this process: no case is started later.

    Returns:
        Those that ran to their end, on small cases: the first of them is not `trial`.
    """
    end = time.process_time() + seconds
    found: list[Trial] = []
    seen = {trial.case}

    def run(case: Case) -> Trial | None:
        declared = trial.kernel.takes
        refused = declared is not None and declared.reason_against(case.problem) is not None
        if case in seen or refused or len(found) >= _MOST or time.process_time() > end:
            return None
        if _work(case) > _WORK:
            return None
        seen.add(case)
        other = Trial(trial.kernel, case, trial.setup, trial.backend, independent=trial.independent)
        if other.execution.error or not comparisons(other):
            return None
        found.append(other)
        return other

    for case in (*others, *longer_shorter(trial.case)):
        run(case)
    model = others[0] if others else trial.case
    bases = (
        moderate(model, plain=True),
        moderate(model, plain=True, sequences=2),  # what is wrong from the second on
        moderate(model, plain=False),
        model,
    )
    for base in dict.fromkeys(bases):
        rich = run(base)
        if base in seen and (rich is None or _fails(rich)):
            for case in simpler(base):
                run(case)
            break
    return found


def _fails(trial: Trial) -> bool:
    parts = comparisons(trial).values()
    return any(bool((part.ratio > 1).any() | part.broken.any()) for part in parts) or bool(
        trial.execution.unwritten
    )


def _work(case: Case) -> float:
    p = case.problem
    passes = 3.5 if case.backward else 1.0
    area = p.batch * p.heads_q * p.seqlen_q * p.seqlen_k
    return passes * area * (p.head_dim + p.head_dim_v)
