"""`Result`: one line of a record with its case read and its kernel named."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Final, Literal

from fa_verify.verdict import Verdict

if TYPE_CHECKING:
    from collections.abc import Container

    from fa_verify.case import Case
    from fa_verify.record import CaseRecord

__all__ = ["TENSORS", "Result", "compared", "features", "work"]

TENSORS: Final = ("o", "lse", "dq", "dk", "dv")
_FURTHER: Final = ("dbias", "dsinks")  # shown where some case has them


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """One kernel on one case.

    Attributes:
        kernel: Its name in this summary, unique.
        case: The case, read from its line.
        verdict: What the harness said.
        record: The line as it was written.
    """

    kernel: str
    case: Case
    verdict: Verdict
    record: CaseRecord

    @property
    def precision(self) -> str:
        """The dtype, and what else decides roundings: "float32/tf32", "float8_e4m3fn/bfloat16"."""
        return self.case.problem.precision

    @property
    def direction(self) -> Literal["fwd", "bwd"]:
        """The pass."""
        return "bwd" if self.case.backward else "fwd"

    @property
    def verified(self) -> bool:
        """Whether the case reached pass or fail."""
        return self.verdict in (Verdict.PASS, Verdict.FAIL)

    @property
    def seconds(self) -> float:
        """Spent on the case, all stages."""
        spent = self.record.seconds
        return spent.get("total", sum(spent.values()))

    @property
    def order(self) -> tuple[str, ...]:
        """A sort key that does not depend on which worker ran what when."""
        r = self.record
        return self.kernel, self.precision, self.direction, r.case, r.setup, r.verdict, r.replay


def compared(present: Container[str]) -> tuple[str, ...]:
    """The tensors that a report shows, of which those that not every problem has must be there."""
    return (*TENSORS, *(name for name in _FURTHER if name in present))


def work(case: Case) -> int:
    """How large a case is: multiplications of its forward pass, an empty axis counted as 1."""
    p = case.problem
    return (
        p.batch * p.heads_q * max(1, p.seqlen_q) * max(1, p.seqlen_k) * (p.head_dim + p.head_dim_v)
    )


def features(case: Case) -> frozenset[str]:
    """What a kernel must know to run the case, beyond a plain square problem.

    >>> from fa_verify.case import Case
    >>> sorted(features(Case.parse("pass=bwd h=4/2 s=1x64 d=80 dtype=float16 mask=causal seed=0")))
    ['causal', 'gqa', 'head_dim not a power of two', 'seqlen_q != seqlen_k']
    """
    p = case.problem
    layouts = (p.layout_q, p.layout_k, p.layout_v, p.layout_do, p.layout_bias)
    present = {
        "causal": p.mask.causal,
        "window": p.mask.window_left is not None or p.mask.window_right is not None,
        "top-left alignment": p.mask.banded and p.mask.alignment == "top-left",
        "documents": bool(p.mask.documents),
        "pattern": bool(p.mask.pattern),
        "softcap": p.softcap > 0,
        "gqa": p.group > 1,
        "head_dim_v != head_dim": p.head_dim_v != p.head_dim,
        "head_dim not a power of two": p.head_dim & (p.head_dim - 1) != 0,
        "seqlen_q != seqlen_k": p.seqlen_q != p.seqlen_k,
        "empty sequence": min(p.seqlen_q, p.seqlen_k) == 0,
        **dict.fromkeys(p.terms, True),
        "fp8": bool(p.fp8),
        "strided layouts": any(str(layout) not in ("bhsd", "bshd") for layout in layouts),
    }
    return frozenset(name for name, there in present.items() if there)
