"""`aspects`: what kind of case a case is, in an author's words. No torch, no Triton.

The distribution joins them two by two, and reports say which pairs a kernel has met.
"""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fa_verify.case import Case
    from fa_verify.layouts import Layout
    from fa_verify.masks import Mask

__all__ = ["ORDER", "Aspect", "Pair", "aspects", "pairs"]

Aspect = tuple[str, str]
"""What about a case, and which kind: ("mask", "causal")."""
Pair = tuple[Aspect, Aspect]

ORDER = (
    *("pass", "dtype", "mask", "lengths", "blocks", "heads", "batch", "head_dim", "head_dim_v"),
    *("q", "k", "v", "softcap", "scale", "bias", "alibi", "sinks", "dropout", "lse_grad"),
    *("documents", "pattern", "fp8"),
)
"""The names of aspects, as a case has them; terms and the last only where there are such."""

_DEPTHS = (64, 128, 256)
_FAR = 1 << 20  # slack, in elements, that only a tensor past 2^31 elements has
_BLOCK = 64


def aspects(case: Case) -> tuple[Aspect, ...]:
    """What kind of case it is, in a fixed order.

    >>> from fa_verify.case import Case
    >>> dict(aspects(Case.parse("pass=bwd h=4/2 s=9x64 d=80 dtype=float16 mask=causal seed=0")))[
    ...     "heads"
    ... ]
    'groups'
    """
    p = case.problem
    power = p.head_dim & (p.head_dim - 1) == 0
    depth = next(depth for depth in _DEPTHS if p.head_dim <= depth)
    scale = p.softmax_scale
    found = {
        "pass": "backward" if case.backward else "forward",
        "dtype": p.precision,
        "mask": _mask(p.mask),
        "lengths": _lengths(p.seqlen_q, p.seqlen_k),
        "blocks": "partial" if p.seqlen_q % _BLOCK or p.seqlen_k % _BLOCK else "whole",
        "heads": "one each" if p.group == 1 else "groups" if p.heads_kv > 1 else "one key head",
        "batch": "several" if p.batch > 1 else "1",
        "head_dim": f"up to {depth}, {'a' if power else 'no'} power of two",
        "head_dim_v": "the same" if p.head_dim_v == p.head_dim else "another",
        "q": _layout(p.layout_q),
        "k": _layout(p.layout_k),
        "v": _layout(p.layout_v),
        "softcap": "some" if p.softcap else "none",
        "scale": "default" if scale is None else "above 0" if scale > 0 else "0 or below",
    }
    found |= {name: p.bias if name == "bias" else "some" for name in p.terms}
    if p.mask.documents:
        found["documents"] = _documents(p.mask.documents)
    if p.mask.pattern:
        found["pattern"] = p.mask.pattern.partition(":")[0]
    if p.fp8:
        found["fp8"] = p.fp8
    return tuple(found.items())


def pairs(case: Case) -> frozenset[Pair]:
    """What comes together in a case, two by two."""
    return frozenset(itertools.combinations(aspects(case), 2))


def _mask(mask: Mask) -> str:
    if not mask.banded:
        return "none"
    windowed = mask.window_left is not None or mask.window_right is not None
    kind = "causal" if not windowed else "causal window" if mask.causal else "window"
    return f"{kind}, {mask.alignment}"


def _documents(documents: tuple[tuple[int, int], ...]) -> str:
    if len(documents) == 1:
        return "one"
    return "some empty" if any(0 in lengths for lengths in documents) else "several"


def _lengths(seqlen_q: int, seqlen_k: int) -> str:
    if not (seqlen_q and seqlen_k):
        return "one empty"
    order = (seqlen_q > seqlen_k) - (seqlen_q < seqlen_k)
    return {0: "equal", 1: "more queries", -1: "more keys"}[order]


def _layout(layout: Layout) -> str:
    if layout.shared_heads:
        return "one head for all"
    if max(layout.pad) >= _FAR:
        return "past 2^31"
    if layout.order.endswith("d"):
        return "padded" if any(layout.pad) else layout.order
    return "transposed"
