"""`refuted`: whether what is supposed of a module's integers cannot be."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fa_verify.ttir.mutation.inequalities import infeasible
from fa_verify.ttir.mutation.integers import Reading, UnclearError

if TYPE_CHECKING:
    from collections.abc import Callable

    from fa_verify.ttir.mutation.changes import Facts
    from fa_verify.ttir.mutation.inequalities import Inequality
    from fa_verify.ttir.mutation.integers import Parted

__all__ = ["refuted"]

_CASES = 60  # of one question, that are divided: beyond, it has no answer

Rows = list["Inequality"]


def refuted(suppose: Callable[[Reading], None], facts: Facts) -> bool:
    """Whether what is supposed cannot be.

    Args:
        suppose: Supposes it.
        facts: Of the module.
    """
    reading = Reading(facts)
    try:
        suppose(reading)
    except UnclearError:
        return False
    pending = [([*reading.known, *reading.facts], [*reading.either, *reversed(reading.parted)])]
    for _ in range(_CASES):
        left = _settled(*pending.pop())
        if left is not None:
            rows, parted = left
            if not parted:
                return False
            first, *rest = parted
            pending += [([*rows, *side], [*more, *rest]) for side, more in first]
        if not pending:
            return True
    return False


def _settled(rows: Rows, parted: list[Parted]) -> tuple[Rows, list[Parted]] | None:
    """What holds and is open once all is supposed that has one side left; None: it cannot be."""
    if infeasible(rows):
        return None
    again = True
    while again:
        again = False
        for one in parted:
            sides = [(side, more) for side, more in one if not infeasible([*rows, *side])]
            if not sides:
                return None
            if len(sides) == 1:
                ((side, more),) = sides
                rows, parted = [*rows, *side], [*more, *(x for x in parted if x is not one)]
                again = True
                break
    return rows, parted
