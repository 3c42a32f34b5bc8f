"""`draw`: the cases of a seed in the order in which a campaign meets them."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

from fa_verify.aspects import pairs
from fa_verify.distribution.corners import CORNERS, MODEST, NO_TERMS, PLAIN
from fa_verify.distribution.drawing import sample
from fa_verify.distribution.gaps import GAP_CORNERS
from fa_verify.distribution.scales import SCALE_CORNERS
from fa_verify.distribution.space import Space
from fa_verify.distribution.tables import CANDIDATES, FIRST
from fa_verify.distribution.terms import TERM_CORNERS

if TYPE_CHECKING:
    from collections.abc import Sequence

    from fa_verify.aspects import Pair
    from fa_verify.capabilities import Capabilities
    from fa_verify.case import Case
    from fa_verify.distribution.corners import Corner

__all__ = ["draw"]


def draw(
    seed: int,
    count: int,
    capabilities: Capabilities | None = None,
    *,
    dtype: str | None = None,
    backward: bool | None = None,
    max_elements: int | None = None,
    forms: Sequence[object] = (),
) -> list[Case]:
    """The first `count` cases of the sequence that belongs to a seed.

    First come the corners, each after a case drawn at random; each of these first cases is the one
    of `CANDIDATES` that joins most aspects not yet seen together. The classes of shape and the q, k
    families are spread evenly over the sequence, so that a hundred cases already hold every class
    in its share.

    Args:
        seed: Which sequence.
        count: How many cases.
        capabilities: What the kernel takes; None: everything.
        dtype: Only this one; float8_e4m3fn: only with q, k and v in it.
        backward: Only cases with a backward pass, or only without.
        max_elements: Most batch * heads_q * seqlen_q * seqlen_k.
        forms: Where compiling is dear. What a kernel is compiled for (head dims, dtype, kind of
            mask, softcap, layouts) is then drawn from these seeds, case i from ``forms[i % n]``;
            lengths, heads, batch, windows, scale and values stay free.

    Raises:
        InvalidInputError: The capabilities leave nothing to draw.

    >>> draw(0, 3) == draw(0, 5)[:3]
    True
    >>> len({case.problem.head_dim for case in draw(0, 50, forms=[7])})
    1
    """
    space = Space.of(capabilities, dtype=dtype, backward=backward, max_elements=max_elements)
    start = random.Random(f"start {seed}")  # noqa: S311 - reproducible, not secret
    first, second = start.random(), start.random()
    corners = _corners(space, formed=bool(forms))
    cases: list[Case] = []
    seen: set[Pair] = set()
    for index in range(count):
        # The R2 sequence: Martin Roberts, "The unreasonable effectiveness of quasirandom
        # sequences" (2018); steps 1/g and 1/g^2, g^3 = g + 1.
        spread = (
            (first + index * 0.7548776662466927) % 1.0,
            (second + index * 0.5698402909980532) % 1.0,
        )
        chosen = index < 2 * len(corners)
        drawn = [
            sample(
                random.Random(f"case {seed} {index} {candidate}"),  # noqa: S311
                space,
                spread=spread,
                form=f"form {forms[index % len(forms)]}" if forms else None,
                corner=_corner(index, corners),
            )
            for candidate in range(CANDIDATES if chosen else 1)
        ]
        case = max(drawn, key=lambda one: len(pairs(one) - seen)) if chosen else drawn[0]
        seen |= pairs(case) if chosen else set()
        cases.append(case)
    return cases


def _corner(index: int, corners: Sequence[Corner]) -> Corner:
    """What the case is drawn from: every second of the first ones lies in a corner."""
    if index < 2 * len(corners) and index % 2:
        return corners[index // 2]
    return MODEST if index < FIRST else PLAIN


def _corners(space: Space, *, formed: bool) -> list[Corner]:
    """The corners that the space has; those of a form only where forms are free."""
    every = (*CORNERS, *TERM_CORNERS, *GAP_CORNERS, *SCALE_CORNERS)
    return [c for c in every if _has(space, c) and not (formed and c.of_a_form)]


def _has(space: Space, corner: Corner) -> bool:
    c = space.capabilities
    tables = {"MASKS": space.masks, "HEADS": space.heads}
    taken = {
        "SOFTCAPS": c is None or c.softcap,
        "LAYOUTS": c is None or c.layouts,
        "EDGE_LENGTHS": c is None or c.empty,
        "TERMS": corner.kept("TERMS") == (NO_TERMS,)
        or (c is not None and any(getattr(c, name) for name in corner.kept("TERMS"))),
        "FP8": c is not None and any(map(c.takes_scales, corner.kept("FP8"))),
        "DOCUMENTS": c is not None and c.documents,
        "PATTERNS": c is not None and bool(set(c.patterns) & set(corner.kept("PATTERNS"))),
    }
    for name, kept in corner.tables:
        if name in tables and not any(entry in kept for entry, _ in tables[name]):
            return False
        if name == "HEAD_DIMS" and not set(space.head_dims) & set(kept):
            return False
        if not taken.get(name, True):
            return False
    return True
