"""Which cases are looked at: few, that together have what kernels are compiled for."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fa_verify import distribution

if TYPE_CHECKING:
    from collections.abc import Iterator

    from fa_verify.case import Case
    from fa_verify.kernel import Kernel

__all__ = ["chosen"]

_TIMES = 60  # as many cases are drawn as are wanted
_WORK = 1 << 22  # logits of a case, at most: some launchers are run twice, and nothing is learnt


def chosen(kernel: Kernel, cases: int, seed: int, dtype: str | None) -> list[Case]:
    """Cases of the default distribution, each one that which brings most traits not yet seen."""
    backward = None if kernel.backward is not None else False
    pool = [
        case
        for case in distribution.draw(
            seed, _TIMES * cases, kernel.takes, dtype=dtype, backward=backward, max_elements=_WORK
        )
        if min(case.problem.seqlen_q, case.problem.seqlen_k) > 0
    ]
    traits = {case: set(_traits(case)) for case in pool}
    seen: set[tuple[object, ...]] = set()
    found: list[Case] = []
    for _ in range(min(cases, len(traits))):
        best = max(traits, key=lambda case: len(traits[case] - seen))
        seen |= traits.pop(best)
        found.append(best)
    return found


def _traits(case: Case) -> Iterator[tuple[object, ...]]:
    """What decides registers, shared memory and which instructions there are."""
    p = case.problem
    dtype = (p.dtype, p.dot_precision if p.dtype == "float32" else "")
    width = (max(p.head_dim, p.head_dim_v) - 1).bit_length()
    yield "pass", case.backward, *dtype
    yield "width", width, *dtype
    yield "width", width, case.backward
    yield "causal", p.mask.causal, case.backward
    yield "window", p.mask.window_left is not None, case.backward
    yield "softcap", p.softcap > 0, case.backward
    yield "group", p.group > 1, case.backward
    yield "unequal", p.head_dim != p.head_dim_v, case.backward
