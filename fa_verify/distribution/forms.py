"""`forms`: the few forms that a campaign compiles where that is dear, chosen to join much.

A form is what kernels are compiled for: dtype and dot precision, head dims, kind of mask, terms,
softcap, layouts. Drawn at random, a dozen leave out half of what a kernel takes in the rarer
precisions; chosen for what they join, they leave out what most calls are, and the fast paths made
for it.
"""

from __future__ import annotations

import functools
import itertools
import random
from typing import TYPE_CHECKING

from fa_verify.aspects import aspects
from fa_verify.distribution.corners import Corner
from fa_verify.distribution.drawing import sample
from fa_verify.distribution.space import Space
from fa_verify.errors import InvalidInputError
from fa_verify.variants import FP8, PLAIN, variants

if TYPE_CHECKING:
    from fa_verify.capabilities import Capabilities
    from fa_verify.case import Case
    from fa_verify.layouts import Layout

__all__ = ["forms"]

_Pair = tuple[object, object]

_CANDIDATES = 32  # for each form: among 24 times as many, 24 reach all variants of `flash`
# New variants of one form: each is more to compile and to compute, and hides faults of the others.
_ENOUGH = 8  # 6, beside usual forms, leave out up to 4 of the 60 pairs of `flash`
_USUAL = 5  # one form in so many is such that fast paths are made for it
_HEAD_DIMS = (64, 80, 96, 128, 256)
# Bytes: what copies of tiles want strides to be multiples of, and a matrix unit rows.
_ALIGNED, _DEPTH = 16, 32
_BARE = frozenset((PLAIN, "causal", *FP8[:2]))  # scales of a block change within a tile
_FAST = _BARE | {"window", "sinks"}
_TRIES = 64  # cases of a candidate that a kernel may refuse before another takes its place
_BACKWARD = Corner(name="", backward=True)  # some terms are of this pass alone
_OF_A_FORM = frozenset(
    {
        *("dtype", "mask", "head_dim", "head_dim_v", "q", "k", "v", "softcap", "bias", "alibi"),
        *("sinks", "dropout", "lse_grad", "pattern", "fp8"),
    }
)


@functools.lru_cache(maxsize=64)  # kernels of a file declare much the same
def forms(
    seed: int, count: int, capabilities: Capabilities | None = None, *, dtype: str | None = None
) -> tuple[str, ...]:
    """Seeds of forms, for `draw`: each the candidate left that brings most that is new.

    What counts first is a variant of attention (a mask, a term, a softcap, none of all) in a
    precision; then any two aspects together. The first forms are chosen among the usual ones:
    causal or no mask, no term, half precision or fp8, a common head dim, aligned rows; the last of
    these has a window or sinks beside.

    Args:
        seed: Of the candidates.
        count: How many forms.
        capabilities: What the kernel takes; None: everything.
        dtype: Only this one.
    """
    space = Space.of(capabilities, dtype=dtype)
    names = [f"{seed} {candidate}" for candidate in range(_CANDIDATES * count)]
    cases = {name: case for name in names if (case := _case(name, space)) is not None}
    left = {name: (_variants(case), _pairs(case)) for name, case in cases.items()}
    met: set[_Pair] = set()
    seen: set[_Pair] = set()
    chosen: list[str] = []
    bare = {name for name, case in cases.items() if _usual(case, _BARE)}
    usual = {name for name, case in cases.items() if name not in bare and _usual(case, _FAST)}
    turns = [bare] * (count // _USUAL)
    turns[1:] = [*turns[2:], usual] if turns[1:] else []
    while left and len(chosen) < count:
        among = turns[len(chosen)].intersection(left) if len(chosen) < len(turns) else ()
        best = max(
            (name for name in left if not among or name in among),
            key=lambda name: _worth(*left[name], met, seen),
        )
        own, pairs = left.pop(best)
        met |= own
        seen |= pairs
        chosen.append(best)
    rest = (name for name in names if name not in cases)  # hardly anything is taken: see `draw`
    return (*chosen, *itertools.islice(rest, count - len(chosen)))


def _worth(
    own: set[_Pair], pairs: set[_Pair], met: set[_Pair], seen: set[_Pair]
) -> tuple[int, int, int]:
    """What a form brings: variants not met, no more of them than enough; then pairs not seen."""
    return min(_ENOUGH, len(own - met)), -len(own), len(pairs - seen)


def _case(form: str, space: Space) -> Case | None:
    """One of the form; None where the kernel refuses too many."""
    rng = random.Random(f"of {form}")  # noqa: S311 - reproducible, not secret
    try:
        return sample(rng, space, form=f"form {form}", corner=_BACKWARD, tries=_TRIES)
    except InvalidInputError:
        return None


def _usual(case: Case, kinds: frozenset[str]) -> bool:
    """Whether fast paths are made for its form, of these variants at most."""
    p = case.problem
    size = 1 if p.fp8 else 2
    return (
        p.dtype != "float32"
        and p.head_dim == p.head_dim_v
        and p.head_dim in _HEAD_DIMS
        and p.head_dim * size % _DEPTH == 0
        and kinds.issuperset(variants(case, of_a_form=True))
        and all(_aligned(x, _ALIGNED // size) for x in (p.layout_q, p.layout_k, p.layout_v))
    )


def _aligned(layout: Layout, elements: int) -> bool:
    return (
        layout.order.endswith("d")
        and not layout.pad[3]
        and not layout.shared_heads
        and not any(count % elements for count in (*layout.pad, layout.offset))
    )


def _variants(case: Case) -> set[_Pair]:
    """The variants of attention that its form is of, each with its precision."""
    return {(case.problem.precision, name) for name in variants(case, of_a_form=True)}


def _pairs(case: Case) -> set[_Pair]:
    """Its aspects that a form decides, two by two."""
    every = [aspect for aspect in aspects(case) if aspect[0] in _OF_A_FORM]
    if case.problem.mask.documents:
        every.append(("documents", "some"))
    return set(itertools.combinations(every, 2))
