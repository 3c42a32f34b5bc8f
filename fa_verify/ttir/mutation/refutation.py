"""`refuted`: whether what is supposed of a module's integers cannot be."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fa_verify.ttir.mutation.inequalities import infeasible
from fa_verify.ttir.mutation.integers import Reading, UnclearError

if TYPE_CHECKING:
    from collections.abc import Callable

    from fa_verify.ttir.mutation.numbering import Numbering

__all__ = ["refuted"]

_CASES = 200  # of one question: beyond, it has no answer


def refuted(suppose: Callable[[Reading], None], numbering: Numbering) -> bool:
    """Whether what is supposed cannot be.

    Args:
        suppose: Supposes it.
        numbering: Which values are equal.
    """
    reading = Reading(numbering)
    try:
        suppose(reading)
    except UnclearError:
        return False
    pending = [([*reading.known, *reading.facts], [*reading.either, *reversed(reading.parted)])]
    for _ in range(_CASES):
        facts, parted = pending.pop()
        if not infeasible(facts):
            if not parted:
                return False
            first, *rest = parted
            pending += [([*facts, *side], [*more, *rest]) for side, more in first]
        if not pending:
            return True
    return False
