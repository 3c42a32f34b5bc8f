"""Bias, ALiBi, sinks, dropout and lse's gradient, for kernels that declare them.

They join a case that is drawn already, from numbers of their own: what is drawn for a kernel that
declares none of them does not depend on this module.
"""

from __future__ import annotations

import dataclasses
import math
import random
from typing import TYPE_CHECKING, Any

from fa_verify.distribution import tables
from fa_verify.distribution.corners import NO_TERMS, Corner
from fa_verify.distribution.placement import placed
from fa_verify.problem import TERMS

if TYPE_CHECKING:
    from fa_verify.capabilities import Capabilities
    from fa_verify.case import Case
    from fa_verify.distribution.tables import Table
    from fa_verify.problem import Problem

__all__ = ["TERM_CORNERS", "with_terms"]

_CAUSAL = ((True, False, False, "bottom-right"),)

TERM_CORNERS = (
    Corner(
        name="a bias that hides keys",
        tables=(("TERMS", ("bias",)), ("BIAS", ("hides",)), ("SHAPES", ("medium", "small"))),
    ),
    Corner(
        # Where it is wrong to add each head's part to one sequence's, there must be several.
        name="a bias that many rows share",
        tables=(
            *(("TERMS", ("bias",)), ("BIAS_AXES", ("", "h", "k", "q", "hk", "qk", "bk"))),
            *(("HEADS", ((2, 6, 2), (3, 8, 2))), ("SHAPES", ("small",))),
        ),
        backward=True,
    ),
    Corner(
        name="slopes of either sign, along a shifted diagonal",
        tables=(
            *(("TERMS", ("alibi",)), ("SLOPES", ("signed",)), ("RELATIONS", ("unequal",))),
            *(("SHAPES", ("medium", "small")), ("HEADS", ((1, 6, 3), (2, 6, 2)))),
        ),
    ),
    Corner(
        name="rows that see no key but have a sink",
        tables=(
            *(("TERMS", ("sinks", "lse_grad")), ("MASKS", _CAUSAL), ("SHAPES", ("medium",))),
            ("RELATIONS", ("unequal",)),
        ),
        order="more queries",
    ),
    Corner(
        name="sinks of some heads only",
        tables=(
            *(("TERMS", ("sinks",)), ("SINKS", ("off",)), ("SHAPES", ("small", "medium"))),
            ("HEADS", ((1, 6, 3), (2, 6, 2))),
        ),
        backward=True,
    ),
    Corner(
        # One axis at a time: a row of them is 64 elements or fewer, within a block.
        name="a bias past 2^31 by query",
        tables=(
            *(("TERMS", ("bias",)), ("BIAS_LAYOUTS", ("huge",)), ("SHAPES", ("small",))),
            *(("DTYPES", ("float16", "bfloat16")), ("BIAS_AXES", ("qk", "hqk", "bqk", "bhqk"))),
        ),
        axis=2,
        backward=True,
    ),
    Corner(
        name="a bias past 2^31 by key",
        tables=(
            *(("TERMS", ("bias",)), ("BIAS_LAYOUTS", ("huge",)), ("SHAPES", ("small",))),
            *(("DTYPES", ("float16", "bfloat16")), ("BIAS_AXES", ("k", "hk", "qk", "bk"))),
        ),
        axis=3,
        backward=True,
    ),
    Corner(
        name="dropout of nearly all",
        tables=(("TERMS", ("dropout",)), ("DROPOUT", (0.9,)), ("SHAPES", ("small", "medium"))),
        backward=True,
    ),
    Corner(
        name="all terms at once",
        tables=(("TERMS", TERMS), ("SHAPES", ("small", "medium"))),
        backward=True,
    ),
)
"""Corners of problems with terms; each for kernels that declare one of its TERMS."""


def with_terms(case: Case, c: Capabilities | None, corner: Corner, form: str | None) -> Case | None:
    """The case with terms that the kernel takes; as it is, where it takes none.

    Of a form, for which others are compiled, None where they do not fit.

    Args:
        case: Drawn already.
        c: What the kernel takes; None: nobody said that it takes terms.
        corner: Which terms there must be, if any.
        form: Seed of the choices that a kernel is compiled for, instead of the case.
    """
    declared = [] if c is None else [name for name in TERMS if getattr(c, name)]
    if c is None or not declared:
        return case
    rng = random.Random(f"terms {case}")  # noqa: S311 - reproducible, not secret
    former = rng if form is None else random.Random(f"terms {form}")  # noqa: S311
    drawing = _Drawing(rng, former, c, corner)
    wanted = drawing.names(declared)
    problem = drawing.problem(case.problem, wanted, backward=case.backward)
    lacks = form is not None and not drawing.fit(problem, wanted)
    if lacks or c.reason_against(problem) is not None:
        return case if form is None else None
    names = ("bias", "slopes", "sinks", "dlse")
    families = {name: drawing.pick(name.upper()) for name in names}
    there = {"bias": problem.bias, "slopes": problem.alibi, "sinks": problem.sinks}
    there["dlse"] = problem.lse_grad
    kept = {name: family for name, family in families.items() if there[name]}
    if problem.dropout and c.wide_seeds:  # a seed's width is a type of the kernel's argument
        kept["seeds"] = _at(tables.SEEDS, former.random())
    values = dataclasses.replace(case.values, **kept)
    return dataclasses.replace(case, problem=problem, values=values)


class _Drawing:
    """The terms of one case being drawn."""

    def __init__(
        self, rng: random.Random, form: random.Random, c: Capabilities, corner: Corner
    ) -> None:
        self._rng = rng
        self._form = form
        self._c = c
        self._corner = corner

    def names(self, declared: list[str]) -> list[str]:
        """Each of those declared in a third of the cases, and none at all in some."""
        bare = self._form.random() < (tables.BARE if len(declared) > 1 else 0.0)
        share = tables.WITH_TERM / (1.0 - (tables.BARE if len(declared) > 1 else 0.0))
        drawn = [name for name in declared if self._form.random() < share]
        if self._corner.kept("TERMS") == (NO_TERMS,):
            return []
        must = [name for name in declared if name in self._corner.kept("TERMS")]
        return must or ([] if bare else drawn)

    def problem(self, p: Problem, names: list[str], *, backward: bool) -> Problem:
        """The problem with these terms, as far as they fit."""
        elements = p.batch * p.heads_q * p.seqlen_q * p.seqlen_k
        dropout = self.pick("DROPOUT") if elements <= tables.MOST_TERMS else 0.0
        fields: dict[str, Any] = {
            "bias": self._axes(p) if "bias" in names else "",
            "alibi": "alibi" in names,
            "sinks": "sinks" in names,
            "dropout": dropout if "dropout" in names else 0.0,
            "lse_grad": "lse_grad" in names and backward,
        }
        with_terms = dataclasses.replace(p, **fields)
        if with_terms.bias and self._c.layouts:
            table = self._left("BIAS_LAYOUTS")
            kind = _at(table, self._form.random())
            if self._form is not self._rng:  # on a card, where a huge tensor takes memory
                kind = kind.replace("huge", "bhsd")
            axis = self._corner.axis
            layout = placed(kind, "bias", with_terms, self._form.random, axis)
            return dataclasses.replace(with_terms, layout_bias=layout)
        return with_terms

    def fit(self, p: Problem, names: list[str]) -> bool:
        """Whether the problem has those of these terms that its size may forbid."""
        there = {"bias": bool(p.bias), "dropout": p.dropout > 0}
        return all(there.get(name, True) for name in names)

    def _axes(self, p: Problem) -> str:
        """Axes of a bias that the kernel takes, of not too many elements."""
        kept = self._corner.kept("BIAS_AXES")
        free = self._form is self._rng  # a form's axes are what they are
        fits = [axes for axes in self._c.bias if not free or _size(p, axes) <= tables.MOST_TERMS]
        fits = [axes for axes in fits if axes in kept] or fits
        weights = tuple((axes, 4.0 if axes.endswith("qk") else 1.0) for axes in fits)
        axes = _at(weights, self._form.random()) if weights else ""
        return axes if _size(p, axes) <= tables.MOST_TERMS else ""

    def pick(self, name: str) -> Any:
        """An entry of a table, of those that the corner keeps."""
        return _at(self._left(name), self._rng.random())

    def _left(self, name: str) -> Table[Any]:
        """A table, or what the corner keeps of it."""
        table: Table[Any] = getattr(tables, name)
        kept = self._corner.kept(name)
        return tuple(entry for entry in table if entry[0] in kept) or table


def _size(p: Problem, axes: str) -> int:
    sizes = {"b": p.batch, "h": p.heads_q, "q": p.seqlen_q, "k": p.seqlen_k}
    return math.prod(sizes[axis] for axis in axes)


def _at(table: Table[Any], position: float) -> Any:
    """The entry under a position in [0, 1) when the weights are laid end to end."""
    rest = position * sum(weight for _, weight in table)
    for value, weight in table:
        rest -= weight
        if rest < 0:
            return value
    return table[-1][0]
