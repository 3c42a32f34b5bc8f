"""Packed documents, and masks with gaps, for kernels that declare them.

They join a case that is drawn already, from numbers of their own: what is drawn for a kernel that
declares neither does not depend on this module.
"""

from __future__ import annotations

import dataclasses
import random
from typing import TYPE_CHECKING, Any

from fa_verify.distribution import tables
from fa_verify.distribution.corners import Corner

if TYPE_CHECKING:
    from collections.abc import Callable

    from fa_verify.capabilities import Capabilities
    from fa_verify.case import Case
    from fa_verify.distribution.tables import Table
    from fa_verify.problem import Problem

__all__ = ["GAP_CORNERS", "with_gaps"]

_CAUSAL = ((True, False, False, "bottom-right"), (True, False, False, "top-left"))
_SOME = (("SHAPES", ("medium", "small")),)

GAP_CORNERS = (
    Corner(
        # Where a diagonal of the packed sequence is another than the documents' own.
        name="documents with a diagonal each",
        tables=(("DOCUMENTS", (("cut", "cut"),)), ("MASKS", _CAUSAL), *_SOME),
        backward=True,
    ),
    Corner(
        name="empty documents, first and last",
        tables=(("DOCUMENTS", (("cut", "cut"),)), ("EMPTY", ("both ends",)), *_SOME),
        backward=True,
    ),
    Corner(
        name="blocks of a mask, some rows of them hidden",
        tables=(("PATTERNS", ("block-sparse",)), *_SOME),
        backward=True,
    ),
    Corner(
        name="documents of one query and many keys",
        tables=(("DOCUMENTS", (("ones", "cut"),)), ("SHAPES", ("decode", "wide"))),
    ),
    Corner(
        name="documents that end beside a block",
        tables=(("DOCUMENTS", (("beside", "beside"),)), ("SHAPES", ("medium", "long"))),
    ),
    Corner(
        name="elements of a mask here and there",
        tables=(("PATTERNS", ("predicate", "scattered")), *_SOME),
        backward=True,
    ),
    Corner(
        name="one document",
        tables=(("DOCUMENTS", (("one", "one"),)), ("MASKS", _CAUSAL), *_SOME),
    ),
    Corner(
        # The last rows are that far: those of the last documents, or in their blocks.
        name="documents past 2^31 by row",
        tables=(
            *(("DOCUMENTS", (("cut", "cut"),)), ("EMPTY", ("none",)), ("LAYOUTS", ("huge",))),
            *(("DTYPES", ("float16", "bfloat16")), *_SOME),
        ),
        axis=2,
        backward=True,
    ),
    Corner(
        name="documents of the same lengths",
        tables=(("DOCUMENTS", (("alike", "alike"),)), ("EMPTY", ("none",)), *_SOME),
    ),
)
"""Corners of such problems; each for kernels that declare what it needs."""


def with_gaps(case: Case, c: Capabilities | None, corner: Corner, form: str | None) -> Case | None:
    """The case with documents and a pattern, as the kernel takes them; seldom both.

    Where they do not fit it is the case without; of a form, for which others are compiled, None.

    Args:
        case: Drawn already.
        c: What the kernel takes; None: nobody said that it takes either.
        corner: What there must be; another corner's cases stay what it made of them.
        form: Seed of the choices that a kernel is compiled for, instead of the case.
    """
    if c is None or not (c.documents or c.patterns):
        return case
    rng = random.Random(f"gaps {case}")  # noqa: S311 - reproducible, not secret
    former = rng if form is None else random.Random(f"gaps {form}")  # noqa: S311
    packed, sparse = former.random() < tables.PACKED, former.random() < tables.SPARSE_MASKS
    if corner.name and form is None:
        packed, sparse = bool(corner.kept("DOCUMENTS")), bool(corner.kept("PATTERNS"))
    p, drawing = case.problem, _Drawing(rng, former, corner)
    if packed and c.documents:
        mask = dataclasses.replace(p.mask, documents=drawing.documents(p))
        p = dataclasses.replace(p, batch=1, mask=mask)
    large = p.seqlen_q * p.seqlen_k > tables.MOST_GAPS
    if sparse and not large:
        pattern = drawing.pattern(p, c.patterns)
        p = dataclasses.replace(p, mask=dataclasses.replace(p.mask, pattern=pattern))
    refused = c.reason_against(p) is not None
    if form is not None and (refused or (sparse and large)):
        return None
    return case if refused else dataclasses.replace(case, problem=p)


class _Drawing:
    """What one case's mask has besides a band."""

    def __init__(self, rng: random.Random, form: random.Random, corner: Corner) -> None:
        self._rng = rng
        self._form = form
        self._corner = corner

    def documents(self, p: Problem) -> tuple[tuple[int, int], ...]:
        """Documents that fill the sequence."""
        kinds: tuple[str, str] = self._pick("DOCUMENTS")
        count: int = self._pick("COUNTS")
        if kinds == ("one", "one"):
            return ((p.seqlen_q, p.seqlen_k),)
        queries = self._lengths(kinds[0], p.seqlen_q, count)
        keys = queries if kinds[1] == "same" else self._lengths(kinds[1], p.seqlen_k, count)
        most = max(1, len(queries), len(keys))
        lengths = [
            _filled([*side, *[0] * (most - len(side))], total)
            for side, total in ((queries, p.seqlen_q), (keys, p.seqlen_k))
        ]
        for place in self._empty(most):
            both = self._rng.random() < 1 / 3
            one = self._rng.random() < 1 / 2
            for side, emptied in ((0, both or one), (1, both or not one)):
                if emptied:  # a neighbour further in takes what it had
                    neighbour = place + 1 if place < most - 1 - place else place - 1
                    lengths[side][neighbour] += lengths[side][place]
                    lengths[side][place] = 0
        return tuple(zip(*lengths, strict=True))

    def _empty(self, count: int) -> list[int]:
        """Which documents lose their queries, their keys, or both."""
        if count < 2:
            return []
        between = [int(self._rng.random() * count) for _ in range(1 + count // 4)]
        places = {
            "first": [0],
            "last": [count - 1],
            "both ends": [0, count - 1] if count > 2 else [0],
            "between": sorted(set(between)),
        }
        return places.get(self._pick("EMPTY"), [])

    def _lengths(self, kind: str, total: int, count: int) -> list[int]:
        if kind == "ones":
            return [1] * min(count - 1, total)
        if kind == "alike":
            return [total // count] * count
        if kind == "beside":
            block = self._pick("BLOCKS")
            found: list[int] = []
            while sum(found) < total and len(found) < count:
                found.append(max(0, block + int(self._rng.random() * 3) - 1))
            return found
        cuts = sorted(int(self._rng.random() * (total + 1)) for _ in range(count - 1))
        return [b - a for a, b in zip([0, *cuts], [*cuts, total], strict=True)]

    def pattern(self, p: Problem, names: tuple[str, ...]) -> str:
        """A pattern of those that the kernel takes."""
        table = tuple(entry for entry in self._left("PATTERNS") if entry[0] in names)
        if not table:
            return ""
        name = _at(table, self._form.random())
        size = _at(self._left("GAP_SIZES"), self._form.random())
        seed = int(self._rng.random() * 1000)
        numbers: dict[str, Callable[[], tuple[Any, ...]]] = {
            "block-sparse": lambda: (size, self._pick("SEEN_PERCENT"), seed),
            "prefix": lambda: (int(self._rng.random() * (p.seqlen_k + 1)),),
            "dilated": lambda: (self._pick("STEPS"),),
            "global-local": lambda: (self._pick("WIDTHS"), self._pick("GLOBAL")),
            "scattered": lambda: (self._pick("STEPS"), seed),
            "predicate": lambda: (seed,),
        }
        return ":".join((name, *map(str, numbers[name]())))

    def _left(self, name: str) -> Table[Any]:
        table: Table[Any] = getattr(tables, name)
        kept = self._corner.kept(name)
        return tuple(entry for entry in table if entry[0] in kept) or table

    def _pick(self, name: str) -> Any:
        return _at(self._left(name), self._rng.random())


def _filled(lengths: list[int], total: int) -> list[int]:
    """The lengths cut off where they reach the total; the last takes what they lack."""
    left, found = total, []
    for length in lengths:
        found.append(min(length, left))
        left -= found[-1]
    return [*found[:-1], found[-1] + left]


def _at(table: Table[Any], position: float) -> Any:
    """The entry under a position in [0, 1) when the weights are laid end to end."""
    rest = position * sum(weight for _, weight in table)
    for value, weight in table:
        rest -= weight
        if rest < 0:
            return value
    return table[-1][0]
