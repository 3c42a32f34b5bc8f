"""Which cases mutants are tried on: cheap ones that, two traits at a time, have everything."""

from __future__ import annotations

import collections
import itertools
from typing import TYPE_CHECKING

from fa_verify import campaign

if TYPE_CHECKING:
    from collections.abc import Iterator

    from fa_verify.backends.base import Setup
    from fa_verify.case import Case
    from fa_verify.kernel import Kernel
    from fa_verify.layouts import Layout

__all__ = ["chosen", "traits"]

_TIMES = 40  # as many cases are drawn as are wanted
_CHEAP = 0.5  # of these, the cheapest share is chosen from
_INT32 = 1 << 31  # elements that a 32-bit offset does not reach
_BLOCK = 64  # queries and keys of a tile, about: what one query costs


def chosen(kernel: Kernel, cases: int, seed: int) -> list[tuple[Case, Setup]]:
    """Cases of a run, in the order in which they are to be tried.

    A few large cases would take most of the time, and show little that small ones do not. One after
    the other, the case is chosen that brings most pairs of traits, each counted half as much for
    every case that has it already.

    Args:
        kernel: The kernel.
        cases: How many.
        seed: Of the run that draws them.
    """
    drawn = list(campaign.drawn(kernel, campaign.Plan(cases=_TIMES * cases, seed=seed)))
    drawn.sort(key=_cost)
    pool = dict(enumerate(drawn[: max(cases, int(_CHEAP * len(drawn)))]))
    pairs = {i: list(itertools.combinations(sorted(traits(x[0])), 2)) for i, x in pool.items()}
    seen: collections.Counter[tuple[str, str]] = collections.Counter()
    found = []
    for _ in range(min(cases, len(pool))):
        best = max(pool, key=lambda i: sum(0.5 ** seen[pair] for pair in pairs[i]))
        seen.update(pairs[best])
        found.append(pool.pop(best))
    return sorted(found, key=lambda pair: (_far(pair[0]), _cost(pair)))


def _far(case: Case) -> bool:
    """Whether a stride, taken for a length, makes loops that a time limit must end: these last."""
    return any(trait.startswith("far") for trait in traits(case))


def traits(case: Case) -> Iterator[str]:
    """What a kernel may branch on, and what a defect may need to show."""
    p, mask = case.problem, case.problem.mask
    yield f"pass {case.backward}"
    yield f"dtype {p.dtype} {p.dot_precision if p.dtype == 'float32' else ''}"
    yield f"softcap {p.softcap > 0}"
    yield f"scale {(p.scale > 0) - (p.scale < 0)}"
    yield f"right {mask.causal or mask.window_right is not None}"
    yield f"left {mask.window_left is not None}"
    yield f"group {p.group > 1} {p.heads_kv > 1}"
    yield f"batch {p.batch > 1}"
    yield f"columns {_columns(p.head_dim)}"
    yield f"columns of v {_columns(p.head_dim_v)} {p.head_dim == p.head_dim_v}"
    yield f"longer {(p.seqlen_q > p.seqlen_k) - (p.seqlen_q < p.seqlen_k)}"
    yield f"values {case.values.qk}"
    yield f"values of v {case.values.v}"
    for name, shape in (
        ("q", p.shape_q),
        ("k", p.shape_k),
        ("v", p.shape_v),
        ("do", p.shape_o),
    ):
        layout: Layout = getattr(p, f"layout_{name}")
        for axis, stride in zip("bhsd", layout.strides(shape), strict=True):
            extent = shape["bhsd".index(axis)]
            if stride * (extent - 1) >= _INT32 and (name != "do" or case.backward):
                yield f"far {name} {axis}"


def _columns(head_dim: int) -> str:
    """A power of two, one that 16 bytes divide, or neither."""
    if head_dim & (head_dim - 1) == 0:
        return "2^n"
    return "8n" if head_dim % 8 == 0 else "odd"


def _cost(pair: tuple[Case, Setup]) -> int:
    """Multiply-adds, each tile counted whole."""
    p = pair[0].problem
    tiles = (p.seqlen_q // _BLOCK + 1) * (p.seqlen_k // _BLOCK + 1)
    return p.batch * p.heads_q * tiles * _BLOCK * _BLOCK * (p.head_dim + p.head_dim_v)
