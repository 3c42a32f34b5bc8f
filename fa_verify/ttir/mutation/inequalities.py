"""Whether linear inequalities over whole numbers have no solution, by Fourier-Motzkin elimination.

Each step combines a lower with an upper bound of one unknown; coefficients are divided by their
greatest common divisor and the constant is rounded, as whole numbers allow. "No solution" is
certain; what is not found to have none may have none all the same.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Hashable, Iterable, Mapping, Sequence

__all__ = ["Inequality", "at_least", "infeasible", "minus", "plus", "times"]

Linear = Mapping[Hashable, int]
"""Coefficients of unknowns; that of `ONE` is the constant."""
Inequality = Linear
"""It is 0 or more."""

ONE = ""
_MOST = 300  # inequalities at a time: beyond, the search ends without an answer


def plus(a: Linear, b: Linear) -> dict[Hashable, int]:
    """The sum."""
    found = dict(a)
    for name, n in b.items():
        found[name] = found.get(name, 0) + n
    return {name: n for name, n in found.items() if n}


def times(a: Linear, factor: int) -> dict[Hashable, int]:
    """A multiple."""
    return {name: n * factor for name, n in a.items()} if factor else {}


def minus(a: Linear, b: Linear) -> dict[Hashable, int]:
    """The difference."""
    return plus(a, times(b, -1))


def at_least(a: Linear, b: Linear, more: int = 0) -> dict[Hashable, int]:
    """State that a >= b + more."""
    return plus(minus(a, b), {ONE: -more})


def infeasible(given: Iterable[Inequality]) -> bool:
    """Whether no whole numbers satisfy all."""
    rows = _tightened(given)
    while rows:
        name = _next(rows)
        if name == ONE:
            return False
        lower = [row for row in rows if row.get(name, 0) > 0]
        upper = [row for row in rows if row.get(name, 0) < 0]
        rest = [row for row in rows if not row.get(name, 0)]
        if len(rest) + len(lower) * len(upper) > _MOST:
            return False
        combined = (plus(times(a, -b[name]), times(b, a[name])) for a in lower for b in upper)
        rows = _tightened([*rest, *combined])
    return rows is None


def _next(rows: Sequence[Inequality]) -> Hashable:
    """The unknown that is eliminated next: that which leaves fewest; `ONE`: there is none.

    Whole multiples come last: combined by other factors than 1, they forget that they are whole.
    """
    below: Counter[Hashable] = Counter()
    above: Counter[Hashable] = Counter()
    multiplied = set()
    for row in rows:
        for name, n in row.items():
            if name != ONE:
                (below if n > 0 else above)[name] += 1
                if not -1 <= n <= 1:
                    multiplied.add(name)
    unknowns = below.keys() | above.keys()
    return min(
        unknowns,
        key=lambda name: (
            name in multiplied,
            below[name] * above[name] - below[name] - above[name],
        ),
        default=ONE,
    )


def _tightened(given: Iterable[Inequality]) -> list[dict[Hashable, int]] | None:
    """The same for whole numbers, the tightest of those with the same coefficients; None: never."""
    tightest: dict[frozenset[tuple[Hashable, int]], int] = {}
    for row in given:
        constant = row.get(ONE, 0)
        unknowns = [(name, n) for name, n in row.items() if name != ONE and n]
        if not unknowns:
            if constant < 0:
                return None
            continue
        by = math.gcd(*(n for _, n in unknowns))
        if by > 1:
            unknowns = [(name, n // by) for name, n in unknowns]
            constant //= by
        key = frozenset(unknowns)
        tightest[key] = min(tightest.get(key, constant), constant)
    return [{**dict(key), ONE: constant} for key, constant in tightest.items()]
