"""`variants`: which variants of attention a case is of, in the words of the field."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from fa_verify.case import Case

__all__ = ["EVERY", "ORDER", "variants"]

EVERY: Final = "all"
_PLAIN: Final = "plain"
ORDER: Final = (
    *(EVERY, _PLAIN, "causal", "window", "mask with gaps", "documents", "softcap"),
    *("bias", "alibi", "sinks", "dropout", "lse_grad", "gqa", "mqa", "other head_dim_v"),
    *("cross attention", "empty sequence"),
)
"""As a matrix lists them; what it does not name comes after these."""

_LENGTHS: Final = frozenset({"cross attention", "empty sequence"})


def variants(case: Case) -> tuple[str, ...]:
    """All that the case is of; plain, where at most its lengths are of interest.

    >>> from fa_verify.case import Case
    >>> variants(Case.parse("pass=bwd h=4/2 s=1x64 d=80 dtype=float16 mask=causal seed=0"))
    ('all', 'causal', 'gqa', 'cross attention')
    >>> variants(Case.parse("pass=fwd s=64x64 d=256 dtype=float16 seed=0"))
    ('all', 'plain')
    """
    p = case.problem
    windowed = p.mask.window_left is not None or p.mask.window_right is not None
    present = {
        "causal": p.mask.causal,
        "window": windowed,
        "mask with gaps": bool(p.mask.pattern),
        "documents": bool(p.mask.documents),
        "softcap": p.softcap > 0,
        **dict.fromkeys(p.terms, True),
        "gqa": p.group > 1 and p.heads_kv > 1,
        "mqa": p.group > 1 and p.heads_kv == 1,
        "other head_dim_v": p.head_dim_v != p.head_dim,
        "cross attention": p.seqlen_q != p.seqlen_k,
        "empty sequence": min(p.seqlen_q, p.seqlen_k) == 0,
    }
    found = [name for name, there in present.items() if there]
    plain = [] if set(found) - _LENGTHS else [_PLAIN]
    return (EVERY, *plain, *found)
