"""Errors against bounds, element by element."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fa_verify.bounds import FORMATS
from fa_verify.checks.nearest import nearest
from fa_verify.checks.observed import comparisons
from fa_verify.checks.reading import look_closer
from fa_verify.checks.where import describe
from fa_verify.trial import RUN_CASES, RUN_RISK
from fa_verify.verdict import Failure

if TYPE_CHECKING:
    from collections.abc import Iterator

    import torch

    from fa_verify.checks.comparison import Comparison
    from fa_verify.trial import Trial

__all__ = ["check", "message"]


def check(trial: Trial) -> Iterator[Failure]:
    """Fail where an error exceeds its bound.

    The deterministic bound is provable under the declared arithmetic: one element above it is a
    failure on any input. The probabilistic bound holds with a stated probability over inputs
     drawn independently of the outcome, so it counts only on such (`trial.independent`:
    False for a case that a search found: shrunken, targeted, replayed).
    """
    parts = comparisons(trial).values()
    if trial.independent:
        look_closer(part for part in parts if not part.most > 1)
    for part in parts:
        if part.most > 1:
            yield _failure(part, part.ratio > 1, part.ratio, part.bounded.det, "its bound")
        elif trial.independent and part.most_prob > 1:
            outside = part.ratio_prob > 1
            yield _failure(part, outside, part.ratio_prob, part.prob, _PROBABILISTIC)


_PROBABILISTIC = "its probabilistic bound"


def _failure(
    part: Comparison, outside: torch.Tensor, ratio: torch.Tensor, bound: torch.Tensor, which: str
) -> Failure:
    odds = f"{RUN_RISK:g} in a run of {RUN_CASES} cases"
    suffix = f" (odds for right kernels: {odds})" if which == _PROBABILISTIC else ""
    return Failure(
        check="numerics",
        title=f"{part.name} outside {which}",
        message=message(part, outside, ratio, bound) + suffix + nearest(part),
        tensor=part.name,
    )


def message(
    part: Comparison, outside: torch.Tensor, ratio: torch.Tensor, bound: torch.Tensor
) -> str:
    """Index, got, expected plus or minus bound, ratio, ulps, how many of how many, and where."""
    index = part.worst(ratio)
    got, expected = float(part.got[index]), float(part.reference[index])
    spacing = float(FORMATS[part.dtype].ulp(part.reference[index]))
    count, total = int(outside.sum()), outside.numel()
    place = ", ".join(str(i) for i in index)
    text = (
        f"{part.name}[{place}]: got {got:.9g}, "
        f"expected {expected:.9g} ± {float(bound[index]):.3g}, "
        f"err/bound {float(ratio[index]):.3g}, {abs(got - expected) / spacing:.3g} ulp; "
        f"{count} of {total} elements outside: {describe(part.name, outside)}"
    )
    skipped = int(part.inconclusive.sum())
    if skipped:
        text += f"; {skipped} inconclusive"
    if part.conditional:
        text += "; judged given the observed o and lse"
    return text
