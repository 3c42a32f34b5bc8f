"""Which cases mutants are tried on: cheap ones, and some whose offsets 32 bits do not hold."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fa_verify import campaign
from fa_verify.distribution import INT32

if TYPE_CHECKING:
    from fa_verify.backends.base import Setup
    from fa_verify.case import Case
    from fa_verify.kernel import Kernel
    from fa_verify.problem import Problem

__all__ = ["chosen"]

_TIMES = 16  # as many cases are drawn: one in twenty spans so much
_BLOCK = 64  # queries and keys of a tile, about: what one query costs


def chosen(kernel: Kernel, cases: int, seed: int) -> list[tuple[Case, Setup]]:
    """Cases of a run, cheap ones first.

    A few large cases would take most of the time, and show little that small ones do not.

    Args:
        kernel: The kernel.
        cases: How many. Two thirds are the cheapest of twice as many that are drawn first, a third
            the cheapest of those among sixteen times as many that span 2^31 elements.
        seed: Of the run that draws them.
    """
    drawn = list(campaign.drawn(kernel, campaign.Plan(cases=_TIMES * cases, seed=seed)))
    far = sorted((x for x in drawn if _far(x[0].problem)), key=_cost)[: cases // 3]
    near = [x for x in drawn[: 2 * cases] if x not in far]
    return sorted([*sorted(near, key=_cost)[: cases - len(far)], *far], key=_cost)


def _cost(pair: tuple[Case, Setup]) -> int:
    """Multiply-adds, each tile counted whole."""
    p = pair[0].problem
    tiles = (p.seqlen_q // _BLOCK + 1) * (p.seqlen_k // _BLOCK + 1)
    return p.batch * p.heads_q * tiles * _BLOCK * _BLOCK * (p.head_dim + p.head_dim_v)


def _far(p: Problem) -> bool:
    spans = (
        p.layout_q.span(p.shape_q),
        p.layout_k.span(p.shape_k),
        p.layout_v.span(p.shape_v),
        p.layout_do.span(p.shape_o),
    )
    return max(spans) >= INT32
