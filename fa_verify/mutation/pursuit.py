"""Which further cases mutants that still live should meet: such as run their code, and are unlike.

What a mutant survived says what it lacked only by what these cases share: the one batch that all of
them had. Whether a case runs the code of a mutant is guessed by its traits, before it has run.
"""

from __future__ import annotations

import collections
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

__all__ = ["pursuing"]

# So many cases' worth of what is usual is added to what was seen of few: a trait that the only case
# of a mutant has by chance does not decide.
_USUAL = 2.0
_AGAIN = 0.5  # what a trait is worth once more than before, and a case to a mutant that one was for


def pursuing(
    traits: Sequence[Collection[str]],
    known: Sequence[Collection[str]],
    ran: Sequence[Collection[int]],
    count: int,
) -> list[int]:
    """Choose cases, one after the other.

    Args:
        traits: What cases that may be chosen have.
        known: What cases that have run had.
        ran: For each mutant that lives, which of those ran its code.
        count: How many are asked for.

    Returns:
        Places in `traits`.
    """
    groups = collections.Counter(frozenset(cases) for cases in ran if cases)
    if not traits or not groups:
        return []
    names = {name: at for at, name in enumerate(sorted(set().union(*traits, *known)))}
    offered, had = _table(traits, names), _table(known, names)
    usual = (had.sum(0) + 1) / (len(known) + 1)
    runs = np.zeros((len(groups), len(known)))
    for row, cases in zip(runs, groups, strict=True):
        row[list(cases)] = 1
    met = runs.sum(1, keepdims=True)
    seen = runs @ had  # how often each mutant's cases had each trait
    odds = offered @ np.log((seen + _USUAL * usual) / (met + _USUAL) / usual).T
    share = (met.T + 1) / (len(known) + 2)
    likely = share / (share + (1 - share) * np.exp(-np.clip(odds, -50, 50)))
    weight = np.sqrt(np.array([*groups.values()], dtype=float))
    found: list[int] = []
    for _ in range(min(count, len(traits))):
        new = offered @ (_AGAIN**seen).T / offered.sum(1, keepdims=True)
        gain = (likely * new) @ weight
        gain[found] = -1
        best = int(gain.argmax())
        found.append(best)
        seen = seen + np.outer(likely[best], offered[best])
        weight = weight * _AGAIN ** likely[best]
    return found


def _table(cases: Sequence[Collection[str]], names: dict[str, int]) -> np.ndarray:
    table = np.zeros((len(cases), len(names)))
    for row, traits in zip(table, cases, strict=True):
        row[[names[name] for name in traits]] = 1
    return table
