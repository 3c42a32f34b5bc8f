"""`variants`: which variants of attention a case is of, in the words of the field."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from fa_verify.case import Case

__all__ = ["EVERY", "FP8", "ORDER", "PLAIN", "variants"]

EVERY: Final = "all"
PLAIN: Final = "plain"
FP8: Final = tuple(f"fp8 scales of {of}" for of in ("tensor", "head", "block"))
_OF_SHAPES: Final = ("gqa", "mqa", "cross attention", "empty sequence")
ORDER: Final = (
    *(EVERY, PLAIN, "causal", "window", "mask with gaps", "documents", "softcap"),
    *("bias", "alibi", "sinks", "dropout", "lse_grad", "gqa", "mqa", "other head_dim_v"),
    *("cross attention", "empty sequence"),
    *FP8,
)
"""As they are listed; what it does not name comes after these."""

_PLAIN_TOO: Final = frozenset(ORDER[ORDER.index("cross attention") :])


def variants(case: Case, *, of_a_form: bool = False) -> tuple[str, ...]:
    """All that the case is of; plain, where at most lengths and scales are of interest.

    Args:
        case: The case.
        of_a_form: Leave out what lengths and heads make of it, which no kernel is compiled for.

    >>> from fa_verify.case import Case
    >>> variants(Case.parse("pass=bwd h=4/2 s=1x64 d=80 dtype=float16 mask=causal seed=0"))
    ('causal', 'gqa', 'cross attention')
    >>> variants(Case.parse("pass=fwd h=4/2 s=1x64 d=80 dtype=float16 seed=0"), of_a_form=True)
    ('plain',)
    >>> variants(Case.parse("pass=fwd s=64x64 d=64 dtype=float16 fp8=block64 seed=0"))
    ('plain', 'fp8 scales of block')
    """
    p = case.problem
    present = {
        "causal": p.mask.causal,
        "window": p.mask.window_left is not None or p.mask.window_right is not None,
        "mask with gaps": bool(p.mask.pattern),
        "documents": bool(p.mask.documents),
        "softcap": p.softcap > 0,
        **dict.fromkeys(p.terms, True),
        "gqa": p.group > 1 and p.heads_kv > 1,
        "mqa": p.group > 1 and p.heads_kv == 1,
        "other head_dim_v": p.head_dim_v != p.head_dim,
        "cross attention": p.seqlen_q != p.seqlen_k,
        "empty sequence": min(p.seqlen_q, p.seqlen_k) == 0,
        f"fp8 scales of {p.fp8.rstrip('0123456789')}": bool(p.fp8),
    }
    left_out = _OF_SHAPES if of_a_form else ()
    found = [name for name, there in present.items() if there and name not in left_out]
    plain = [] if set(found) - _PLAIN_TOO else [PLAIN]
    return (*plain, *found)
