"""What is wrong with a gradient that is summed over sequences or heads: of a bias, of sinks."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fa_verify.checks.observed import comparisons

if TYPE_CHECKING:
    from fa_verify.trial import Trial

__all__ = ["summed"]

_FEW = 4  # elements: fewer, the more so if they add up to 0, are any others times a factor
_NEAR = 4.0  # bounds: as near as a right kernel's errors, generously (`fa_verify.diagnosis.score`)


def summed(trial: Trial, name: str) -> str:
    """The sentence for a gradient that is the right one times a factor; else ""."""
    part = comparisons(trial)[name]
    judged = part.judged & (part.reference.abs() > 2 * _NEAR * part.bounded.det)
    got, reference, det = (x[judged] for x in (part.got, part.reference, part.bounded.det))
    if not len(got):
        return ""
    factor = float((got * reference / det.square()).sum() / (reference / det).square().sum())
    if not bool(((got - factor * reference).abs() <= _NEAR * det * max(1.0, abs(factor))).all()):
        return ""
    if factor == 0:
        return f"{name} is 0: it is not computed"
    if bool(((got + reference).abs() <= _NEAR * det).all()):
        return f"{name} is negated"
    if len(got) < _FEW:
        return ""
    return f"{name} is {factor:.4g} times what it should be"
