"""`few`: small cases that, together, have what kernels are compiled for and branch on."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fa_verify.distribution.order import draw

if TYPE_CHECKING:
    from collections.abc import Iterator

    from fa_verify.capabilities import Capabilities
    from fa_verify.case import Case

__all__ = ["few"]

_TIMES = 60  # as many cases are drawn as are wanted
_WORK = 1 << 22  # batch * heads_q * seqlen_q * seqlen_k, at most
_SPAN = 1 << 24  # elements between the first of a tensor and its last, at most


def few(
    capabilities: Capabilities | None,
    count: int,
    seed: int,
    *,
    dtype: str | None = None,
    backward: bool | None = None,
    most: int = _WORK,
) -> list[Case]:
    """Cases of the default distribution, each one that which brings most traits not yet seen.

    Args:
        capabilities: What the kernel takes; None: everything.
        count: How many.
        seed: Of the sequence that they are chosen from.
        dtype: Only this one; float8_e4m3fn: only with q, k and v in it.
        backward: Only cases with a backward pass, or only without.
        most: Most batch * heads_q * seqlen_q * seqlen_k.
    """
    pool = draw(
        seed, _TIMES * count, capabilities, dtype=dtype, backward=backward, max_elements=most
    )
    traits = {case: set(_traits(case)) for case in pool if _compact(case)}
    seen: set[tuple[object, ...]] = set()
    found: list[Case] = []
    for _ in range(min(count, len(traits))):
        best = max(traits, key=lambda case: len(traits[case] - seen))
        seen |= traits.pop(best)
        found.append(best)
    return found


def _compact(case: Case) -> bool:
    """Whether there is something to compute, and no tensor reaches far."""
    p = case.problem
    layouts = (
        (p.layout_q, p.shape_q), (p.layout_k, p.shape_k),
        (p.layout_v, p.shape_v), (p.layout_do, p.shape_o), (p.layout_bias, p.shape_bias),
    )  # fmt: skip
    near = all(layout.span(shape) <= _SPAN for layout, shape in layouts)
    return near and min(p.seqlen_q, p.seqlen_k) > 0


def _traits(case: Case) -> Iterator[tuple[object, ...]]:
    """What decides registers, shared memory and which instructions there are."""
    p = case.problem
    dtype = (p.storage, p.dtype, p.dot_precision if p.dtype == "float32" else "")
    width = (max(p.head_dim, p.head_dim_v) - 1).bit_length()
    yield "pass", case.backward, *dtype
    yield "width", width, *dtype
    yield "width", width, case.backward
    yield "causal", p.mask.causal, case.backward
    yield "window", p.mask.window_left is not None, case.backward
    yield "softcap", p.softcap > 0, case.backward
    yield "group", p.group > 1, case.backward
    yield "unequal", p.head_dim != p.head_dim_v, case.backward
    for name in p.terms:
        yield name, case.backward
    if p.mask.documents:
        yield "documents", case.backward
    if p.mask.pattern:
        yield "pattern", case.backward
