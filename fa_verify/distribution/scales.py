"""fp8 operands, for kernels that take them.

They join a case that is drawn already, from numbers of their own: what is drawn for a kernel that
takes none does not depend on this module.
"""

from __future__ import annotations

import dataclasses
import random
from typing import TYPE_CHECKING, Any

from fa_verify.distribution import tables
from fa_verify.distribution.corners import Corner

if TYPE_CHECKING:
    from fa_verify.capabilities import Capabilities
    from fa_verify.case import Case
    from fa_verify.distribution.tables import Table

__all__ = ["SCALE_CORNERS", "with_scales"]

_EXACT = (("SCALE_VALUES", ("coarse",)), ("LOGITS", (1.0,)), ("SCALES", (None,)))

SCALE_CORNERS = (
    Corner(
        name="scales of many blocks, where dots are exact",
        tables=(
            *(("FP8", ("block16", "block32", "block64")), *_EXACT, ("QK", ("normal",))),
            *(("V", ("normal", "offset")), ("SHAPES", ("medium",))),
        ),
    ),
    Corner(
        name="scales of heads, of several sequences",
        tables=(
            *(("FP8", ("head",)), *_EXACT, ("HEADS", ((2, 6, 2), (3, 8, 2), (2, 3, 3)))),
            *(("V", ("offset",)), ("SHAPES", ("small",))),
        ),
    ),
    Corner(
        name="one scale for each tensor, P at its largest",
        tables=(
            *(("FP8", ("tensor",)), *_EXACT, ("QK", ("dominant-key", "one-hot"))),
            *(("V", ("offset", "ones")), ("SHAPES", ("small", "medium"))),
        ),
    ),
    Corner(
        name="P spread over many keys, each of it small",
        tables=(
            *(("FP8", ("tensor", "head")), *_EXACT, ("QK", ("equal-keys", "zeros", "normal"))),
            *(("V", ("ones", "offset")), ("SHAPES", ("wide", "decode"))),
        ),
    ),
)
"""Corners of problems with fp8 operands; each for kernels that take one of its FP8."""


def with_scales(case: Case, c: Capabilities | None, corner: Corner, form: str | None) -> Case:
    """The case with fp8 operands, if the kernel takes them; always, if it takes nothing else.

    Args:
        case: Drawn already.
        c: What the kernel takes; None: nobody said that it takes fp8.
        corner: What scales there must be, if any; another corner's cases stay as they are.
        form: Seed of the choices that a kernel is compiled for, instead of the case.
    """
    if c is None or c.fp8 == ("",):
        return case
    rng = random.Random(f"scales {case}")  # noqa: S311 - reproducible, not secret
    former = rng if form is None else random.Random(f"scales {form}")  # noqa: S311
    kept = corner.kept("FP8")
    share = float(bool(kept)) if corner.name and form is None else tables.WITH_FP8
    if "" in c.fp8 and (former.random() >= share or case.backward):
        return case
    taken = tuple(entry for entry in tables.FP8 if c.takes_scales(entry[0]))
    problem = dataclasses.replace(
        case.problem,
        fp8=_at(_left(taken, kept), (rng if kept else former).random()),
        dot_precision="ieee",
    )
    values = dataclasses.replace(
        case.values,
        scales=_at(_left(tables.SCALE_VALUES, corner.kept("SCALE_VALUES")), rng.random()),
    )
    return dataclasses.replace(case, problem=problem, values=values)


def _left(table: Table[Any], kept: tuple[Any, ...]) -> Table[Any]:
    return tuple(entry for entry in table if entry[0] in kept) or table


def _at(table: Table[Any], position: float) -> Any:
    """The entry under a position in [0, 1) when the weights are laid end to end."""
    rest = position * sum(weight for _, weight in table)
    for value, weight in table:
        rest -= weight
        if rest < 0:
            return value
    return table[-1][0]
