"""Named rules that hide more than a band does: a mask names one and gives its numbers.

NumPy only. A rule sees places, never elements, and answers for any rows at once. Text names a
pattern: its name and its numbers, joined by colons.

>>> str(Pattern.parse("prefix:3"))
'prefix:3'
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import numpy as np

from fa_verify.errors import InvalidInputError

if TYPE_CHECKING:
    from collections.abc import Callable

    import numpy.typing as npt

    _Bools = npt.NDArray[np.bool_]

__all__ = ["NAMES", "Pattern", "Places"]

_MOST = 1 << 31


@dataclasses.dataclass(frozen=True, slots=True)
class Places:
    """Where a rule is asked: some queries and all keys.

    Attributes:
        queries: int64, (rows, 1).
        keys: int64, (1, seqlen_k).
        diagonals: The key on each query's diagonal, int64, (rows, 1).
    """

    queries: npt.NDArray[np.int64]
    keys: npt.NDArray[np.int64]
    diagonals: npt.NDArray[np.int64]


@dataclasses.dataclass(frozen=True, slots=True)
class Pattern:
    """A rule and its numbers.

    Attributes:
        name: Of the rule; numbers: what it is given beside the places.
    """

    name: str
    numbers: tuple[int, ...]

    @classmethod
    def parse(cls, text: str) -> Pattern:
        """Read a pattern.

        Raises:
            InvalidInputError: There is no such rule, or it takes other numbers.
        """
        name, *numbers = text.split(":")
        if name not in _RULES:
            msg = f"pattern={text!r}: must begin with one of {', '.join(_RULES)}"
            raise InvalidInputError(msg)
        _, least = _RULES[name]
        form = ":".join((name, *(f"{key.upper()}" for key in least)))
        if len(numbers) != len(least) or not all(number.isdecimal() for number in numbers):
            msg = f"pattern={text!r}: must be {form}, whole numbers"
            raise InvalidInputError(msg)
        found = tuple(int(number) for number in numbers)
        for (key, low), number in zip(least.items(), found, strict=True):
            if not low <= number < _MOST:
                msg = f"pattern={text!r}: {key}={number} must be at least {low} and below 2^31"
                raise InvalidInputError(msg)
        return cls(name, found)

    def __str__(self) -> str:
        """The text that `parse` reads."""
        return ":".join((self.name, *map(str, self.numbers)))

    def sees(self, places: Places) -> _Bools:
        """Whether the rule lets each query see each key, (rows, seqlen_k)."""
        rule, _ = _RULES[self.name]
        return rule(places, *self.numbers)


def _block_sparse(at: Places, size: int, percent: int, seed: int) -> _Bools:
    """Square blocks, so many in a hundred of them seen; one row of blocks in eight sees none."""
    rows, columns = at.queries // size, at.keys // size
    return (_mixed(rows, columns, seed) % 100 < percent) & (_mixed(rows, rows, ~seed) % 8 > 0)


def _prefix(at: Places, length: int) -> _Bools:
    """Prefix-LM: all see the first keys, and else only back from the diagonal."""
    return (at.keys < length) | (at.keys <= at.diagonals)


def _dilated(at: Places, step: int) -> _Bools:
    """Every step-th key, counted from the diagonal."""
    found: _Bools = (at.diagonals - at.keys) % step == 0
    return found


def _global_local(at: Places, width: int, count: int) -> _Bools:
    """Longformer: neighbours of the diagonal, and first tokens that see, and are seen by, all."""
    near: _Bools = np.abs(at.diagonals - at.keys) <= width
    return near | (at.keys < count) | (at.queries < count)


def _scattered(at: Places, count: int, seed: int) -> _Bools:
    """Documents whose tokens are strewn over the sequence; a query is of its diagonal's."""
    queries, keys = (_mixed(place, place, seed) % count for place in (at.diagonals, at.keys))
    same: _Bools = queries == keys
    return same


def _predicate(at: Places, seed: int) -> _Bools:
    """An arbitrary function of both indices, as a mask_mod may be."""
    found: _Bools = (at.queries * at.queries + 3 * at.keys + seed) % 7 < 3
    return found


def _mixed(a: npt.NDArray[np.int64], b: npt.NDArray[np.int64], seed: int) -> npt.NDArray[np.uint64]:
    """A number that looks random, the same for the same two; the finaliser of splitmix64."""
    x = a.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    x = x + b.astype(np.uint64) * np.uint64(0xC2B2AE3D27D4EB4F)
    x = x + np.uint64(seed * 0xD6E8FEB86659FD93 % (1 << 64))
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


# Name: the rule, and the least that each of its numbers may be.
_RULES: dict[str, tuple[Callable[..., _Bools], dict[str, int]]] = {
    "block-sparse": (_block_sparse, {"size": 1, "percent": 0, "seed": 0}),
    "prefix": (_prefix, {"length": 0}),
    "dilated": (_dilated, {"step": 1}),
    "global-local": (_global_local, {"width": 0, "count": 0}),
    "scattered": (_scattered, {"count": 1, "seed": 0}),
    "predicate": (_predicate, {"seed": 0}),
}

NAMES = tuple(_RULES)
"""Of all rules."""
